"""Ctrl-C, where weights are put back."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.reconstruction.new_weights import NewWeights
from gradprobe_hf.run.apply import applied
from gradprobe_hf.runtime.interrupts import ended_as_interrupted, uninterrupted
from gradprobe_hf.selection.masked_values import SavedValues
from tests import cases


@pytest.fixture(autouse=True)
def heeded():
    """A suite in the background of a shell ignores SIGINT, one under nohup SIGHUP, and so would its tests."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_it_waits_and_then_interrupts():
    done = []

    def body():
        ctrl_c()
        ctrl_c()
        done.append(1)

    with pytest.raises(KeyboardInterrupt), uninterrupted():
        body()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_is_an_interrupt_and_waits_like_one(number):
    done = []

    def body():
        with uninterrupted():
            signal.raise_signal(number)
            done.append(1)

    with pytest.raises(KeyboardInterrupt), ended_as_interrupted():
        body()
    assert done
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_terminal_that_is_closed_interrupts_once():
    """Its shell sends the signal, too, and what is taken back then would stay half done."""
    done = []

    def body():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            done.append(1)

    with pytest.raises(KeyboardInterrupt), ended_as_interrupted():
        body()
    assert done
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("ignored", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_handlers_that_somebody_has_set_stay(ignored):
    """Where SIGINT is ignored, termination would be too; nohup ignores SIGHUP."""
    numbers = [signal.SIGTERM, signal.SIGHUP] if ignored == signal.SIGINT else [ignored]
    before = signal.signal(ignored, signal.SIG_IGN)
    try:
        kept = [signal.getsignal(number) for number in numbers]
        with ended_as_interrupted():
            assert [signal.getsignal(number) for number in numbers] == kept
    finally:
        signal.signal(ignored, before)


def test_an_error_of_the_body_is_not_lost():
    def body():
        ctrl_c()
        raise OSError("full")

    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        body()
    assert isinstance(caught.value.__context__, OSError)


def test_another_thread_has_nothing_to_hold_back():
    done = []

    def work():
        with uninterrupted():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_weights_are_given_back_whole(monkeypatch):
    """Interrupted in the body, and again, impatiently, while the weights are put back."""
    model = cases.build("llama")
    targets = find_targets(model)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    masks = {target.name: torch.rand(target.shape) < 0.5 for target in targets}
    real = SavedValues.restore

    def impatient(self):
        ctrl_c()
        real(self)

    monkeypatch.setattr(SavedValues, "restore", impatient)
    with pytest.raises(KeyboardInterrupt), applied(model, targets, masks):
        ctrl_c()
    assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())


def test_an_update_changes_places_or_does_not(monkeypatch):
    updates, matrix = NewWeights(), torch.zeros(2, 3)
    updates.add("a", torch.ones(2, 3))
    real = NewWeights._exchange

    def impatient(self, name, matrix):
        ctrl_c()
        real(self, name, matrix)

    monkeypatch.setattr(NewWeights, "_exchange", impatient)
    with pytest.raises(KeyboardInterrupt):
        updates.install("a", matrix)
    assert (updates.pending, matrix.sum(), updates["a"].sum()) == (set(), 6, 0)
    with pytest.raises(KeyboardInterrupt):
        updates.withdraw("a", matrix)
    assert (updates.pending, matrix.sum(), updates["a"].sum()) == ({"a"}, 0, 6)
