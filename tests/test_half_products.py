"""Sums of products of bfloat16 matrices, as float64 has them."""

from pathlib import Path

import pytest
import torch

from gradprobe_hf.reconstruction.hessians import lower_gram, mirrored_
from gradprobe_hf.runtime import half_products
from gradprobe_hf.runtime.half_products import RoundedMatrix, widened_from


@pytest.fixture
def settings():
    found = getattr(torch.backends.mkldnn, "matmul", None)
    if found is None:
        pytest.skip("torch before 2.9 has no such setting")
    return found


@pytest.mark.parametrize("width", [48, 640])
def test_products_of_bfloat16_are_those_of_float64(width):
    """To the rounding of float32: rounded to bfloat16 they would be a thousand times as far away."""
    x, other = torch.randn(2, 200, width, generator=torch.Generator().manual_seed(0)).bfloat16().unbind()
    with widened_from(x):
        gram, cross = mirrored_(lower_gram(x.float())), other.float().T @ x.float()
    for found, exact in ((gram, x.double().T @ x.double()), (cross, other.double().T @ x.double())):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_operands_are_not_rounded(settings, dtype):
    """One of float16 or float32 has digits that bfloat16 has not."""
    before = settings.fp32_precision
    with widened_from(torch.ones(2, 2, dtype=dtype)):
        assert settings.fp32_precision == before


def test_a_setting_that_follows_the_general_one_does_so_again(settings):
    general = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "ieee"
        with widened_from(torch.ones(2, 2, dtype=torch.bfloat16)):
            pass
        torch.backends.fp32_precision = "tf32"
        assert settings.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = general


def test_the_setting_is_as_it_was_after_an_error(settings):
    before = settings.fp32_precision

    def fail():
        with widened_from(torch.ones(2, 2, dtype=torch.bfloat16)):
            assert settings.fp32_precision == "bf16"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert settings.fp32_precision == before


def test_a_rounded_matrix_is_rounded_where_there_are_units(monkeypatch):
    left, right = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).unbind()
    for found in (True, False):
        monkeypatch.setattr(half_products, "has_units", lambda _, found=found: found)
        product = RoundedMatrix(right).after(left)
        assert product.dtype == torch.float32
        assert torch.equal(product, left @ right) != found
        torch.testing.assert_close(product, left @ right, rtol=0, atol=0.2)  # 64 products of numbers about one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_float32_is_rounded(dtype, monkeypatch):
    monkeypatch.setattr(half_products, "has_units", lambda _: True)
    left, right = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    assert torch.equal(RoundedMatrix(right).after(left), left @ right)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what a CPU can do in a file")
def test_units_are_those_of_this_cpu():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert half_products.has_units(torch.device("cpu")) == bool(flags & {"avx512_bf16", "amx_tile"})
    assert not half_products.has_units(torch.device("meta"))
