"""Hooks of one pass: put up before it, and gone with it, whether it ends or fails.

Why this is no `try`/`finally`: between two events of a Trainer none of our code is on the stack, and a Trainer that
raises tells its callbacks nothing. What a failed pass cannot leave behind is its autograd graph, so the graph decides:

    forward returns -> the graph owns a marker -> the graph is freed -> the marker's weak reference calls `remove`
    forward raises  -> `remove` at once

A graph is freed with the last reference to its loss. When backward fails that is the traceback, whose frames hold the
loss: hooks stay for as long as somebody keeps the error, and a notebook does. `with callback:` does not wait for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

MARKER = "gradprobe_hf"


class PassHooks:
    """The hooks that one callback has on a model; false while there are none.

    Example:
        >>> import torch
        >>> layer, hooks = torch.nn.Linear(2, 1), PassHooks()
        >>> hooks.add([layer.weight.register_post_accumulate_grad_hook(print)])
        >>> hooks.remove_after_pass(layer)
        >>> loss = layer(torch.ones(2)).sum()
        >>> del loss  # and with it the graph
        >>> bool(hooks)
        False
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._marker: weakref.ref[_Marker] | None = None

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles += handles

    def remove(self, _: object = None) -> None:
        """Remove every hook. Harmless when there is none."""
        while self._handles:
            self._handles.pop().remove()
        # A weak reference that is dropped never calls back: a graph of this pass that somebody keeps cannot remove the
        # hooks of a later one.
        self._marker = None

    def remove_after_pass(self, model: nn.Module) -> None:
        """Remove the hooks when the graph of the model's next forward passes is freed, or when one of them raises."""
        self.add([model.register_forward_hook(self._bind_to_graph, always_call=True)])

    def _bind_to_graph(self, _module: nn.Module, _arguments: Any, output: Any) -> None:
        if output is None:  # forward raised: then `always_call` comes from torch's `except`, before there is an output
            self.remove()
            return
        nodes = list(_nodes(output))
        if not nodes:
            return
        # One marker for all graphs of a step, which a model that runs twice for one loss has two of: counting
        # references finds the last of them. The graphs own it and this object does not, or it would outlive them.
        marker = self._marker() if self._marker else None
        if marker is None:
            marker = _Marker()
            self._marker = weakref.ref(marker, self.remove)
        # In every output's node: of a loss that is made of the logits, the graph of the model's own is freed at once.
        for node in nodes:
            metadata = cast(dict[str, Any], node.metadata)  # a dict that the node owns; torch's stubs declare a method
            metadata[MARKER] = marker


class _Marker:
    """Says by being alive that a graph is. (A plain `object()` takes no weak reference.)"""


def _nodes(output: Any) -> Iterator[Node]:
    """The node of every differentiable tensor in an output: any of them may be what the loss is made of."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif isinstance(output, (Mapping, tuple, list)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _nodes(part)
