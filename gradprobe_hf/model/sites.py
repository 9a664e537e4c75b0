"""Sites: the modules that use a weight matrix as a plain linear map or embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

from gradprobe_hf.model.families import expert_parameters, is_fused_experts, is_plain, is_read_by_parent
from gradprobe_hf.model.parameters import aliases

# A "vector" is no matrix at all, but the gain of a norm or a bias: served, trained, and never pruned. Of an "other" no
# more is known than its values (a convolution, a router, what a parent module reads): its zeros are kept in training.
Kind = Literal["linear", "conv1d", "embedding", "experts", "vector", "other"]


@dataclass(frozen=True)
class Site:
    """A module that uses a matrix. A tied matrix has several sites, and an experts module is a site of many matrices.

    Attributes:
        module: its name in the model.
    """

    module: str
    kind: Kind


@dataclass(frozen=True)
class Use:
    """A site's use of one parameter.

    Attributes:
        name: of the module, or of the fused parameter.
        names: what patterns are matched with: the module's and the parameter's, under each name that the module has.
    """

    name: str
    parameter: str
    site: Site
    names: frozenset[str]


def plain_uses(model: nn.Module) -> list[Use]:
    """Every use of a weight as a plain linear map or embedding, in the model's order."""
    plain: dict[Kind, type[nn.Module]] = {"linear": nn.Linear, "conv1d": Conv1D, "embedding": nn.Embedding}
    found = []
    # A module may stand in several places, as the blocks that Zamba shares do.
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    for module, (name, *elsewhere) in places.items():
        for kind, cls in plain.items():
            if is_plain(module, cls) and not is_read_by_parent(model, name):
                names = (own for place in (name, *elsewhere) for own in (place, f"{place}.weight"))
                found.append(Use(name, f"{name}.weight", Site(name, kind), frozenset(names)))
        if is_fused_experts(module):
            for parameter in expert_parameters(module):
                fused = f"{name}.{parameter}"
                names = (f"{place}.{parameter}" for place in (name, *elsewhere))
                found.append(Use(fused, fused, Site(name, "experts"), frozenset(names)))
    return found


def uses_by_parameter(model: nn.Module, uses: list[Use]) -> dict[str, list[Use]]:
    """The uses of each parameter under its canonical name, linear maps before embeddings."""
    shared: dict[str, list[Use]] = {}
    tied = aliases(model)
    for use in uses:
        shared.setdefault(tied.get(use.parameter, use.parameter), []).append(use)
    return {name: sorted(users, key=lambda use: use.site.kind == "embedding") for name, users in shared.items()}
