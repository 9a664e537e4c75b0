"""Temporary folders, and what a process leaves behind that was killed."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys

import pytest

from gradprobe_hf.runtime import scratch
from gradprobe_hf.runtime.scratch import remove_scratch, scratch_folder

pytest.importorskip("fcntl", reason="folders cannot be locked here")

KILLED = """
import os, signal, sys
from gradprobe_hf.runtime.scratch import scratch_folder
for kind in ("weights", "accumulators"):
    (scratch_folder(kind, sys.argv[1]) / "half").write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_in(folder):
    assert subprocess.run([sys.executable, "-c", KILLED, folder]).returncode == -signal.SIGKILL
    return sorted(folder.iterdir())


def test_what_a_killed_process_left_goes_with_the_next_folder_of_any_kind(tmp_path):
    assert len(killed_in(tmp_path)) == 2
    mine = scratch_folder("changes", tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    remove_scratch(mine)
    assert not list(tmp_path.iterdir())


def test_what_a_process_holds_stays(tmp_path):
    first = scratch_folder("weights", tmp_path)
    (first / "values").write_text("1")
    killed_in(tmp_path)
    second = scratch_folder("weights", tmp_path)
    assert (first / "values").read_text() == "1"
    assert sorted(tmp_path.iterdir()) == sorted([first, second])
    for folder in (first, second):
        remove_scratch(folder)
    assert scratch._locks.keys().isdisjoint({first, second})


def test_folders_of_another_host_stay_for_their_locks_may_not_be_seen_here(tmp_path, monkeypatch):
    left = killed_in(tmp_path)
    monkeypatch.setattr(platform, "node", lambda: "another")
    remove_scratch(scratch_folder("weights", tmp_path))
    assert sorted(tmp_path.iterdir()) == left


def test_where_nothing_can_be_locked_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    left = killed_in(tmp_path)
    monkeypatch.setattr(scratch, "fcntl", None)
    remove_scratch(scratch_folder("weights", tmp_path))
    assert sorted(tmp_path.iterdir()) == left


def test_one_that_a_user_made_stays(tmp_path):
    (tmp_path / "gradprobe-mine").mkdir()
    remove_scratch(scratch_folder("weights", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gradprobe-mine"]


def test_removing_twice_is_fine(tmp_path):
    folder = scratch_folder("weights", tmp_path / "made" / "here")
    remove_scratch(folder)
    remove_scratch(folder)
    assert not folder.exists()
