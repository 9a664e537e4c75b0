"""Reloads: whether a checkpoint of a model would be that model again, told before any work.

`from_pretrained` makes a model of a configuration and fills it by names. A model that was changed by hand in a way that
its configuration does not say would be saved without an error, and come back as another one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from gradprobe_hf.model.loading.load import skeleton
from gradprobe_hf.model.parameters import aliases
from gradprobe_hf.model.pooler import without_pooler

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def check_reloads(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that its configuration does not make again, or that shares weights undeclared."""
    name = type(model).__name__
    if shared := _undeclared(model):
        first, second = shared
        raise ValueError(
            f"{first} and {second} are one weight, and {name} does not say so, so that it cannot be saved: name "
            f"{second} in its _tied_weights_keys, or give each a weight of its own."
        )
    try:
        made = skeleton(copy.deepcopy(model.config), type(model), **without_pooler(model))
    except Exception as error:  # whatever the code of a class of the user's own raises without its other arguments
        logger.warning("whether a checkpoint of %s loads as it is was not compared: %s", name, error)
        return
    if differs := _difference(_shapes(model), _shapes(made)):
        raise ValueError(
            f"a checkpoint of this {name} would not load as it is: {differs}. Change model.config together with the "
            "model (num_hidden_layers, say); take pruning or parametrisations of torch off before (torch.nn.utils."
            "prune.remove, remove_parametrizations); or save what you have as a class of its own."
        )


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if hasattr(value, "shape")}


def _difference(there: Shapes, wanted: Shapes) -> str | None:
    """What one has and the other has not."""
    for name, shape in wanted.items():
        if name not in there:
            return f"its configuration makes {name}, which it does not have"
        if there[name] != shape:
            return f"{name} is {list(there[name])}, and {list(shape)} by its configuration"
    extra = next((name for name in there if name not in wanted), None)
    return None if extra is None else f"it has {extra}, which its configuration does not make"


def _undeclared(model: PreTrainedModel) -> tuple[str, str] | None:
    """Two names of one weight that transformers does not know to be tied."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    pairs = [(first, alias) for alias, first in aliases(model).items()]
    places: dict[tuple[str, int], str] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_meta and parameter.numel():
            place = str(parameter.device), parameter.data_ptr()
            pairs += [(places[place], name)] if place in places else []
            places.setdefault(place, name)
    return next((pair for pair in pairs if not tied & set(pair)), None)
