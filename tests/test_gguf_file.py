"""GGUF files whose rotary positions are scaled are refused: transformers would make another model of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from transformers import Gemma4TextConfig, LlamaConfig

from gradprobe_hf.model.loading import gguf_file
from gradprobe_hf.model.loading.gguf_file import check_positions

FILE = "tiny.gguf"


def written(folder, change):
    writer = gguf.GGUFWriter(folder / FILE, "llama")
    writer.add_rope_freq_base(10_000.0)
    change(writer)
    writer.add_tensor("token_embd.weight", np.zeros((4, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def linear(writer, factor=2.0):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(factor)


def factors(writer):
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 4, dtype=np.float32))


@pytest.mark.parametrize(("change", "said"), [(linear, "linear by 2"), (factors, r"rope_freqs\.weight")])
def test_scaled_positions_are_refused(change, said, tmp_path):
    written(tmp_path, change)
    with pytest.raises(
        ValueError, match=rf"gguf_file='tiny\.gguf' scales its rotary positions \({said}\).* safetensors"
    ):
        check_positions(str(tmp_path), LlamaConfig(), {"gguf_file": FILE})
    scaled = LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    for known in (scaled, Gemma4TextConfig()):  # of the latter some blocks have positions in part
        check_positions(str(tmp_path), known, {"gguf_file": FILE})


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: None,
        lambda writer: linear(writer, 1.0),
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)),
        lambda writer: writer.add_name("about .rope.scaling. and rope_freqs.weight"),
    ],
    ids=["nothing", "by one", "none", "factors of one", "in a text"],
)
def test_plain_ones_are_not(change, tmp_path):
    written(tmp_path, change)
    check_positions(str(tmp_path), LlamaConfig(), {"gguf_file": FILE})


def test_names_are_looked_for_before_a_header_is_parsed(tmp_path, monkeypatch):
    """That takes seconds."""
    monkeypatch.setattr(gguf, "GGUFReader", lambda _: pytest.fail("it was parsed"))
    written(tmp_path, lambda writer: None)
    assert gguf_file._scaled_by(tmp_path / FILE) is None
