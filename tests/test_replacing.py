"""A folder that appears whole or not at all, and what a process leaves behind that was killed in between."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradprobe_hf.checkpoint.replacing import free_folder, put_back, replacing
from gradprobe_hf.checkpoint.write import check_destination
from tests import cases

KILLED = """
import os, signal, sys
from pathlib import Path
from gradprobe_hf.checkpoint.replacing import replacing
with replacing(Path(sys.argv[1])) as scratch, replacing(Path(sys.argv[2])) as other:
    for folder in (scratch, other):
        (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
pytest.importorskip("fcntl", reason="folders cannot be locked here")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_one(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out", tmp_path / "out.other"]).returncode < 0
    left = names(tmp_path)
    assert len(left) == 2
    with replacing(tmp_path / "out") as scratch:
        (scratch / "whole").write_text("whole")
    assert names(tmp_path) == sorted(["out", *(name for name in left if "other" in name)]), "of this folder alone"
    assert names(tmp_path / "out") == ["whole"]


KILLED_BETWEEN = """
import os, signal, sys
from pathlib import Path
from gradprobe_hf.checkpoint.replacing import replacing
rename = Path.rename
def killed(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
with replacing(Path(sys.argv[1])) as scratch:
    (scratch / "new").write_text("new")
    Path.rename = killed
"""


@pytest.mark.parametrize("is_checked", [True, False])
def test_what_was_about_to_be_replaced_is_put_back(is_checked, tmp_path):
    """A process that is killed between its two renames leaves nothing under the name."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("before")
    assert subprocess.run([sys.executable, "-c", KILLED_BETWEEN, tmp_path / "out"]).returncode < 0
    assert not (tmp_path / "out").exists()
    if is_checked:
        with pytest.raises(FileExistsError, match="exists already"):
            check_destination(tmp_path / "out", "", overwrite=False)
    else:
        with pytest.raises(ZeroDivisionError), replacing(tmp_path / "out"):
            print(1 / 0)
        assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["before"]
    left = tmp_path / ".out.old-abc"
    left.mkdir()
    (left / "out").mkdir()
    put_back(tmp_path / "out")
    assert not left.exists(), "what it left that was killed while it removed the old one"
    assert names(tmp_path / "out") == ["before"]


def test_what_is_being_written_stays(tmp_path):
    """Two runs that write one folder: the one that ends last wins, and each of them is whole."""
    with replacing(tmp_path / "out") as first:
        (first / "first").write_text("1")
        with replacing(tmp_path / "out") as second:
            (second / "second").write_text("2")
        assert names(tmp_path / "out") == ["second"]
        assert names(first) == ["first"]
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["first"]


def test_a_body_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("before")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "out") as scratch:
        (scratch / "half").write_text(str(1 / 0))
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["before"]


def test_a_folder_that_nobody_may_list_is_written_into(tmp_path, monkeypatch):
    def refused(_):
        raise PermissionError("it may be written, and not read")

    monkeypatch.setattr(Path, "iterdir", refused)
    with replacing(tmp_path / "out") as scratch:
        (scratch / "whole").write_text("whole")
    assert (tmp_path / "out" / "whole").read_text() == "whole"


def test_what_is_there_in_the_end_is_not_replaced_unasked(tmp_path, caplog):
    """Of two runs with one `output_dir` that are saved at the same time."""
    with replacing(tmp_path / "out", overwrite=False) as scratch:
        (scratch / "ours").write_text("ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")
    assert names(tmp_path / "out") == ["theirs"]
    assert names(tmp_path / "out-2") == ["ours"]
    assert "the result is in" in caplog.text


def test_a_folder_that_another_run_is_writing_is_taken(tmp_path):
    assert free_folder(tmp_path / "out") == tmp_path / "out"
    with replacing(tmp_path / "out"):
        assert free_folder(tmp_path / "out") == tmp_path / "out-2"
    (tmp_path / ".other.partial-1").mkdir()  # of a run that was killed
    assert free_folder(tmp_path / "other") == tmp_path / "other"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_was_made_meanwhile_takes_nothing_from_a_run(overwrite, tmp_path, caplog):
    """Of another run with the same name, say. `overwrite` was asked for when there was nothing there."""
    out = tmp_path / "out"
    (tmp_path / "out-2").mkdir()

    def loss(model, batch):
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("theirs")
        return model(**batch, labels=batch["input_ids"]).loss

    given = {"loss_fn": loss, "output_dir": out, "overwrite": overwrite}
    result = cases.prune(cases.build("llama"), cases.batches("llama"), apply=True, **given)
    assert names(out) == ["theirs"]
    assert names(tmp_path) == ["out", "out-2", "out-3"]
    assert result.output_dir == tmp_path / "out-3"
    assert (tmp_path / "out-3" / "model.safetensors").is_file()
    assert "out was made while this ran, and is left as it is" in caplog.text
