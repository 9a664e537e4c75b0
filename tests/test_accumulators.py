"""Accumulators in reduced precision: what they keep, what they cost, and where they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradprobe_hf.probe.accumulation import page_cache
from gradprobe_hf.probe.accumulation.accumulators import BYTES_PER_WEIGHT, Accumulator
from gradprobe_hf.probe.accumulation.page_cache import PageCacheTrail
from gradprobe_hf.probe.accumulation.reduced_precision import decode_int8, encode_int8, round_bfloat16
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage

CPU = torch.device("cpu")
SHAPE = (96, 200)


def made(kind, tmp_path=None, shape=SHAPE, dtype=torch.float32):
    return Accumulator(shape, dtype, CPU, AccumulatorStorage(kind, folder=tmp_path), "sum")


def squares(count, shape=SHAPE, seed=0):
    """Squared gradients of sequences, whose size differs from row to row and column to column by orders."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = torch.randn(shape[0], 1, generator=draw), torch.randn(1, shape[1], generator=draw)
    scale = torch.exp(rows / 2) * torch.exp(3 * columns)  # inputs differ by far more than outputs
    for _ in range(count):
        yield (torch.randn(shape, generator=draw) * scale).square()


def added(accumulator, values, chunk=64):
    for value in values:
        for start in range(0, accumulator.shape[0], chunk):
            rows = slice(start, min(start + chunk, accumulator.shape[0]))
            with accumulator.updating(rows, CPU) as part:
                part += value[rows]
    return accumulator


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
def test_bytes_are_what_is_said(kind):
    shape = (64, 640)
    assert made(kind, shape=shape).nbytes == BYTES_PER_WEIGHT[kind] * 64 * 640


@pytest.mark.parametrize(("kind", "spread"), [("float32", 1e-6), ("bfloat16", 0.02), ("int8", 0.15)])
def test_sums_of_many_small_shares_are_right_on_average(kind, spread):
    """200 sequences: rounding to the nearest would have stopped adding after 16 (int8)."""
    exact = sum(value.double() for value in squares(200))
    ratio = added(made(kind), squares(200)).read().double() / exact
    assert ratio.mean() == pytest.approx(1, abs=0.003)
    assert ratio.std() <= spread
    if kind != "float32":
        assert ratio.std() > 1e-4, "it is not float32 by another name"


def test_rounding_to_nearest_would_not_do():
    """The oracle of the test above: the same sum, rounded to the nearest bfloat16 every time."""
    exact = sum(value.double() for value in squares(600))
    total = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for value in squares(600):
        total = (total.float() + value).to(torch.bfloat16)
    assert abs(float((total.double() / exact).mean()) - 1) > 0.05
    kept = added(made("bfloat16"), squares(600)).read().double()
    assert float((kept / exact).mean()) == pytest.approx(1, abs=0.003)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_the_same_additions_give_the_same_bits(kind, tmp_path):
    first = added(made(kind), squares(9))
    again = added(made(kind, tmp_path), squares(9))
    assert torch.equal(first.read(), again.read())


VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 140), st.integers(1, 4)),
    elements=st.floats(0, 2.0**60, width=32, allow_nan=False, allow_subnormal=False),
)


@settings(max_examples=80, deadline=None)
@given(values=VALUES, salt=st.integers(0, 2**40))
def test_int8_is_within_a_level_of_what_was_kept(values, salt):
    exact = torch.from_numpy(values)
    codes, bases = encode_int8(exact.clone(), salt)
    found = decode_int8(codes, bases)
    for block in range(0, exact.shape[0], 64):
        x, y = exact[block : block + 64], found[block : block + 64]
        top = x.amax(0, keepdim=True)
        kept = x > top * 2.0**-15  # the levels reach 16 octaves below the largest
        assert (abs(y - x)[kept] <= x[kept] / 16).all()
        assert (y[x == 0] == 0).all()
        assert (y <= x * (1 + 1 / 16) + top * 2.0**-15).all()


@settings(max_examples=60, deadline=None)
@given(values=VALUES)
def test_a_kept_value_is_kept_again_exactly(values):
    once = decode_int8(*encode_int8(torch.from_numpy(values).clone(), 1))
    twice = decode_int8(*encode_int8(once.clone(), 99))
    assert torch.equal(once, twice)
    rounded = round_bfloat16(torch.from_numpy(values).clone(), 1)
    assert torch.equal(round_bfloat16(rounded.float(), 99), rounded)


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
@pytest.mark.parametrize("nan", [torch.tensor(torch.nan), torch.tensor(torch.nan).copysign(torch.tensor(-1.0))])
def test_what_is_no_number_stays_none(kind, nan):
    """Of either sign: x86 sets that of inf - inf. As zeros they would be the lowest scores of all."""
    values = torch.ones(SHAPE)
    values[5, 7] = nan
    kept = added(made(kind), [values]).read()
    assert kept[5, 7].isnan()
    assert not kept[:, 8].isnan().any()


def test_rounding_is_unbiased_between_two_levels():
    value = torch.full((400, 64), 1.0 + 0.3 / 16)
    for rounded, step in ((decode_int8(*encode_int8(value.clone())), 1 / 16),):
        assert set(rounded.unique().tolist()) == {1.0, 1.0 + step}
        assert float((rounded > 1).float().mean()) == pytest.approx(0.3, abs=0.02)
    small = torch.full((400, 64), 1.0 + 0.3 / 128)
    up = round_bfloat16(small.clone()).float() > 1
    assert float(up.float().mean()) == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
def test_files_hold_the_same_and_nothing_stays_mapped(kind, tmp_path):
    kept = added(made(kind, tmp_path), squares(3))
    assert torch.equal(kept.read(), added(made(kind), squares(3)).read())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == kept.nbytes
    mapped = open("/proc/self/maps").read() if (tmp_path.anchor == "/") else ""  # noqa: SIM115
    assert str(tmp_path) not in mapped


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize(("kind", "spread"), [("float32", 1e-6), ("bfloat16", 0.01), ("int8", 0.07)])
@pytest.mark.parametrize("in_files", [False, True])
def test_rows_may_be_added_to_in_any_order(in_files, kind, spread, order, tmp_path):
    """What nothing was added to is known to be zero and is not read: neither less nor more of it may be."""
    shape = (150, 40)
    kept = made(kind, tmp_path if in_files else None, shape=shape)
    first, second = (value + 1e-3 for value in squares(2, shape))
    for value in (first, second):
        for part in order:
            rows = slice(64 * part, min(64 * (part + 1), 150))
            with kept.updating(rows, CPU) as values:
                values += value[rows]
    largest = (first + second).amax(0)  # int8 keeps 16 octaves below it
    ratio = (kept.read() / (first + second))[(first + second) > largest / 2**12]
    assert float((ratio - 1).abs().max()) < 2.5 * spread
    with kept.updating(slice(None), CPU) as values:
        values += first
    assert float((kept.read() / (2 * first + second)).median()) == pytest.approx(1, abs=0.02)


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradprobe_hf.probe.accumulation.storage.os.posix_fallocate", full)
    with pytest.raises(OSError, match="no room for the accumulators; choose another offload_folder"):
        made("int8", tmp_path)


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
def test_a_trail_changes_nothing_but_what_the_page_cache_keeps(kind, tmp_path, monkeypatch):
    """Six matrices, gone through twice: each file is asked to be forgotten at its end, and once more later."""
    asked = Counter()
    monkeypatch.setattr(page_cache, "drop_pages", lambda paths: asked.update(path.name for path in paths))
    trail, plain = PageCacheTrail(), added(made(kind), squares(2))
    storage = AccumulatorStorage(kind, "disk", tmp_path, trail)
    matrices = [Accumulator(SHAPE, torch.float32, CPU, storage, str(n)) for n in range(6)]
    for value in squares(2):
        for matrix in matrices:
            before = asked.total()
            with matrix.updating(slice(0, 64), CPU) as part:
                part += value[:64]
            assert asked.total() == before, "its last rows are still to come"
            with matrix.updating(slice(64, 96), CPU) as part:
                part += value[64:]
    assert set(asked) == {path.name for path in tmp_path.iterdir()}
    assert min(asked.values()) >= 3, "two passes, and a second time at least after the first"
    for matrix in matrices:
        assert torch.equal(matrix.read(), plain.read())


@pytest.mark.parametrize("system", ["with advice", "without"])
def test_forgetting_keeps_what_was_written_and_survives_a_deleted_file(system, tmp_path, monkeypatch):
    if system == "without":
        monkeypatch.delattr("os.posix_fadvise", raising=False)
    trail = PageCacheTrail()
    storage = AccumulatorStorage("int8", "disk", tmp_path, trail)
    matrices = [
        Accumulator(SHAPE, torch.float32, CPU, storage, str(number)) for number in range(PageCacheTrail.LENGTH + 2)
    ]
    for matrix in matrices[: PageCacheTrail.LENGTH]:
        added(matrix, squares(3))
    for path in tmp_path.glob("0.*"):
        path.unlink()
    for matrix in matrices[PageCacheTrail.LENGTH :]:
        added(matrix, squares(3))
    assert all(torch.equal(matrix.read(), matrices[1].read()) for matrix in matrices[2:])
    assert torch.equal(matrices[1].read(), added(made("int8"), squares(3)).read())


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
@pytest.mark.parametrize("in_files", [False, True])
def test_cleared_is_zero_again(kind, in_files, tmp_path):
    kept = added(made(kind, tmp_path if in_files else None), squares(2))
    kept.clear()
    assert not kept.read().any()
    again, once = added(kept, squares(1, seed=3)).read(), added(made("float32"), squares(1, seed=3)).read()
    seen = once > once.amax(0) / 2**12
    assert float((again / once - 1)[seen].abs().max()) < 0.07


@pytest.mark.parametrize("kind", BYTES_PER_WEIGHT)
def test_state_goes_round(kind):
    first = added(made(kind), squares(3))
    second = made(kind)
    second.restore({name: part.clone() for name, part in first.parts().items()})
    second.updates = first.updates
    assert torch.equal(first.read(), second.read())
    more = list(squares(2, seed=5))
    assert torch.equal(added(first, more).read(), added(second, more).read())


def test_a_float64_model_is_summed_in_float64():
    assert made("float32", dtype=torch.float64).read().dtype == torch.float64
    assert AccumulatorStorage().dtype == "float32"
