"""Folders of tiny checkpoints, so that the command line has something to work on."""

from __future__ import annotations

import gc
import os
import random
from contextlib import contextmanager
from functools import partial

# Before anything imports the Hub's client: it reads these once. No test may reach the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
# A GPU rounds otherwise, and processes that fork cannot share one: its tests are run by themselves, `make test-gpu`.
if "GRADPROBE_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Before torch: matrices are tiny, the cores have a worker each, and no fork may find the lock of a thread pool held.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from hypothesis import settings
from tqdm.std import TqdmDefaultWriteLock, tqdm

from gradprobe_hf.bench.bench import measured
from gradprobe_hf.bench.subject import Subject
from gradprobe_hf.checkpoint import write
from gradprobe_hf.report import plots
from tests import cases, launch, scripts
from tests.loopback_hub import running_hub

# Progress bars share a semaphore with forked children: one that is killed holding it would stop the tests for ever.
# Nor may a fork find the lock of the threads held, by the one that watches the bars.
TqdmDefaultWriteLock.mp_lock = None
tqdm.monitor_interval = 0

settings.register_profile("shared machine", deadline=None)  # an example may wait for a core
settings.load_profile("shared machine")


def pytest_collection_finish():
    """Leave what was imported out of garbage collections: it stays, and is most of what they would look at.

    Accelerate asks for a full one with every Trainer, which would take longer than to train a tiny model.
    """
    gc.collect()
    gc.freeze()


TEXT = " ".join(
    f"The {i}th of many plain sentences, each a little unlike the {i * 7 % 13} before it." for i in range(400)
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # tiny matrices: a second thread only waits


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws is the same whichever tests went before it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def without_pictures():
    """They take a third of the time of a run of a tiny model, and few tests look at them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(write, "save_plots", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def pictures(without_pictures):
    """Draws those of checkpoints for the rest of a file of tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(write, "save_plots", plots.save_plots)
        yield


@pytest.fixture(scope="session", autouse=True)
def teams():
    yield
    launch.stop_teams()


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


@pytest.fixture(scope="session")
def hub_and_user(tmp_path_factory):
    """A Hub, and an interpreter that knows it: the client reads its endpoint once, when it is imported."""
    home = tmp_path_factory.mktemp("home")
    with (
        running_hub() as hub,
        scripts.interpreter(HF_ENDPOINT=hub.url, HF_HOME=str(home), HF_HUB_OFFLINE="0") as user,
    ):
        yield hub, user


@pytest.fixture
def hub(hub_and_user):
    """The Hub, with nothing on it."""
    hub_and_user[0].clear()
    return hub_and_user[0]


@pytest.fixture
def user(hub_and_user):
    return hub_and_user[1]


class Here:
    """A worker in this process."""

    def __init__(self, made_by):
        method, *values, options = made_by
        self.subject = getattr(Subject, method)(*values, **options)

    def ask(self, method, *values):
        found = getattr(self.subject, method)
        return found(*values) if callable(found) else found


@pytest.fixture
def in_this_process(monkeypatch):
    """Shapes are measured by few rounds and no process."""

    @contextmanager
    def started(names, made_by):
        yield [Here(one) for one in made_by]

    monkeypatch.setattr("gradprobe_hf.bench.of_shapes.started", started)
    monkeypatch.setattr("gradprobe_hf.bench.of_shapes.measured", partial(measured, new_tokens=2, repeats=2))
