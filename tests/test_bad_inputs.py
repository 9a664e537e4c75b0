"""Every bad input ends in one clear error, before any work, and leaves nothing behind."""

from __future__ import annotations

import re
import shlex
import tempfile

import pytest
import torch
from transformers import PreTrainedModel

from gradprobe_hf.cli.main import main
from tests.bad_inputs import ALL, Bad
from tests.bad_inputs.case import PRUNE
from tests.bad_inputs.world import World

CLEAR = (ValueError, TypeError, OSError)
LONGEST = 700  # characters of a message


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def untouched(world):
    """What is in every file, and in the models."""
    return world.listing()


@pytest.fixture
def passes(world, untouched, monkeypatch):
    """The models that computed something, one entry a forward pass; afterwards nothing is written, no model changed."""
    seen = []

    def count(module, inputs):
        if isinstance(module, PreTrainedModel) and module.device.type != "meta":
            seen.append(type(module).__name__)

    monkeypatch.chdir(world.here)
    monkeypatch.setattr(tempfile, "tempdir", str(world.temporary))
    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    yield seen
    handle.remove()
    assert world.listing() == untouched, "something was written"
    assert not world.changed(), "a model was changed"


def test_there_are_enough():
    assert len({bad.how for bad in ALL}) == len(ALL) >= 300


@pytest.mark.parametrize("bad", ALL, ids=[bad.how.replace(PRUNE, "prune ..") for bad in ALL])
def test_a_bad_input_is_one_clear_error(bad: Bad, world, passes, capsys):
    said = _said_by_command(bad, world, capsys) if bad.code is not None else _said_by_call(bad, world)
    for name in bad.names:
        assert name.replace("@", f"{world.root}/") in said
    assert len(said.replace(str(world.root), "")) <= LONGEST, "nobody reads that"
    assert passes.count(passes[0] if passes else "") <= bad.passes, "work was begun"


def _said_by_command(bad: Bad, world: World, capsys) -> str:
    arguments = [re.sub(r"@(?=\w)", f"{world.root}/", word) for word in shlex.split(bad.how)]
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse's own
        code = end.code
    out, err = capsys.readouterr()
    assert code == bad.code, err
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith("gradprobe: error: ")
    assert not [line for line in before if line.startswith(("usage", "Traceback", "gradprobe: error"))]
    return last


def _said_by_call(bad: Bad, world: World) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one is what is looked at
        eval(bad.how, dict(world.names))
    assert isinstance(raised.value, CLEAR), repr(raised.value)
    return str(raised.value)
