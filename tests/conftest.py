"""Folders of tiny checkpoints, so that the command line has something to work on."""

from __future__ import annotations

import os

# Before anything imports the Hub's client: it reads these once. No test may reach the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

import pytest
import torch
from tqdm.std import TqdmDefaultWriteLock, tqdm

from tests import cases

# Progress bars share a semaphore with forked children: one that is killed holding it would stop the tests for ever.
# Nor may a fork find the lock of the threads held, by the one that watches the bars.
TqdmDefaultWriteLock.mp_lock = None
tqdm.monitor_interval = 0

TEXT = " ".join(
    f"The {i}th of many plain sentences, each a little unlike the {i * 7 % 13} before it." for i in range(400)
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A saved tiny Llama with its byte tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    cases.build("llama").save_pretrained(folder)
    cases.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "plain.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def other_text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "other.txt"
    path.write_text(TEXT[::-1], encoding="utf-8")
    return path
