"""Loading: an id, a folder or a loaded model -> the model in eval mode."""

from __future__ import annotations

import difflib
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME

from gradprobe_hf.model.config_names import text_attribute
from gradprobe_hf.model.loading.adapters import (
    AdapterSource,
    active_adapters,
    check_mergeable,
    check_stays_in_memory,
    has_adapters,
    has_file,
    merge_stored,
    merged_copy,
    stored_adapter,
)
from gradprobe_hf.model.loading.checkpoint_class import chosen_class, model_class
from gradprobe_hf.model.loading.checks import (
    PLANS,
    WEIGHTS,
    check_dtype,
    check_placement,
    check_quantization,
    check_source,
    load_errors,
)
from gradprobe_hf.model.loading.dequantized import check_stored_plain, keep_dequantized, made_plain
from gradprobe_hf.model.loading.gguf_file import check_positions
from gradprobe_hf.model.loading.report import about_dtype, about_pooler, about_unused, check_complete, ignored_names
from gradprobe_hf.model.loading.stored_files import cached_commit, remember_folded, remember_source, stored_dtype
from gradprobe_hf.model.loading.ties import forget_false_ties
from gradprobe_hf.model.sites import plain_uses
from gradprobe_hf.model.targets import find_targets
from gradprobe_hf.runtime.paths import expanded_model, published_as
from gradprobe_hf.runtime.row_chunks import row_chunks
from gradprobe_hf.runtime.scratch import remove_scratch, scratch_folder

DeviceMap: TypeAlias = str | int | torch.device | Mapping[str, str | int | torch.device] | None

# Our own key in config.json: `quantization_config` would make other libraries refuse the model.
CONFIG_KEY = "gradprobe"
Limits: TypeAlias = Callable[[PreTrainedModel], Mapping[int | str, int] | None] | None

# The arguments of `from_pretrained` that say where files come from: configuration and tokenizer need the same.
SOURCE_KWARGS = ("revision", "subfolder", "cache_dir", "token", "local_files_only", "trust_remote_code", "gguf_file")


@dataclass(frozen=True)
class Loaded:
    """A model and what is known of how it came to be.

    Attributes:
        processing_name: where its tokenizer or processor is; "": nowhere.
        processing_kwargs: what that is loaded with: the `revision`, `subfolder`, `token`, ... of this name.
        adapter: that was folded into it.
        stored_as: the quantised type that its weights were stored in.
        converted_from: the plain type that they were stored in, where they were loaded in another.
        warnings: what a report should say of the load.
    """

    model: PreTrainedModel
    processing_name: str
    adapter: str | None = None
    stored_as: str | None = None
    converted_from: str | None = None
    warnings: tuple[str, ...] = ()
    processing_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> dict[str, Any]:
        """What a report says of it, where there is something: the `adapter` folded into it, and the model that is of
        (`adapter_of`) if it was done before; `stored_as`, `converted_from`; and of a pruned one the sparsity that it
        was `pruned_to`, the `pattern` of its zeros, and the `structure` that went; `once_pruned_to`, if the zeros are
        gone since."""
        before = _said_before(self.model.config)
        # Reports are published, and paths tell about the machine.
        adapter = published_as(self.adapter) if self.adapter else self.adapter
        found = {"adapter": adapter, "stored_as": self.stored_as, "structure": before.get("structure")}
        found |= {"converted_from": self.converted_from}
        # A training that does not keep zeros saves the configuration as it was.
        if (sparsity := before.get("sparsity")) and not _has_zeros(self.model, sparsity):
            found |= {"once_pruned_to": sparsity}
        else:
            # What was made smaller since says what it had been pruned to before that, and not what of it is zero now.
            found |= {"pruned_to": sparsity or before.get("pruned_to")}
            found |= {"pattern": before.get("pattern")} if before.get("pattern") != "unstructured" else {}
        if adapter is None:
            found |= {"adapter": before.get("adapter"), "adapter_of": before.get("adapter_of")}
        return {name: value for name, value in found.items() if value}


def load_model(model_or_id: nn.Module | str | Path, **options: Any) -> PreTrainedModel:
    """The model alone of what `load` gives."""
    return load(model_or_id, **options).model


def load(
    model_or_id: nn.Module | str | Path,
    *,
    auto_classes: Sequence[Any] = (),
    merge_adapters: bool | None = False,
    allow_missing_weights: bool = False,
    limits: Limits = None,
    dequantize: bool = False,
    **from_pretrained_kwargs: Any,
) -> Loaded:
    """A loaded model as it is, or `from_pretrained` with the class the checkpoint asks for.

    `dtype` defaults to the checkpoint's. A GGUF file is dequantised, so that it can be saved again. `device_map="disk"`
    offloads every module. What `torch.compile` has wrapped is unwrapped.

    Args:
        auto_classes: of transformers: the first that knows the configuration loads it; none: the checkpoint's own
            class.
        merge_adapters: fold PEFT adapters into the weights: of an adapter's folder or repository into its base, of a
            model in memory into a copy of it. None: if there are any, as of a model that nothing is pruned of.
        allow_missing_weights: take weights that the checkpoint does not have, or in another size, as they are
            initialised.
        limits: the model without its weights -> `max_memory`, where a device map is planned and none is given.
        dequantize: of a checkpoint in FP8 or MXFP4 to make plain weights, also on a GPU that computes in these.

    Raises:
        ValueError: arguments for loading given with a loaded model, a device map that names no module, adapters that
            were not to be folded, or weights that are missing.
        OSError: no such model, a gated one, or no network; transformers' message and the remedies.
        ImportError: an adapter, and PEFT is not installed.
    """
    if isinstance(model_or_id, nn.Module):
        given = from_pretrained_kwargs | ({"allow_missing_weights": True} if allow_missing_weights else {})
        return _in_memory(getattr(model_or_id, "_orig_mod", model_or_id), merge_adapters, given)
    model_or_id = expanded_model(model_or_id)
    check_source(model_or_id, from_pretrained_kwargs)
    check_dtype(from_pretrained_kwargs.get("dtype"))
    check_placement(from_pretrained_kwargs)
    check_quantization(from_pretrained_kwargs)
    name = str(model_or_id)
    adapter = stored_adapter(name, _source(from_pretrained_kwargs))
    if adapter is None:
        if merge_adapters:
            load_config(name, **_source(from_pretrained_kwargs))  # a name with nothing behind it is an error of its own
            raise ValueError(f"merge_adapters=True has no effect here: {name!r} is no adapter. Leave it out.")
        return _load_checkpoint(name, allow_missing_weights, from_pretrained_kwargs, auto_classes, limits, dequantize)
    check_stays_in_memory(adapter, from_pretrained_kwargs.get("device_map"))
    base_kwargs = {key: value for key, value in from_pretrained_kwargs.items() if key not in ("revision", "subfolder")}
    if adapter.base_revision is not None:
        base_kwargs["revision"] = adapter.base_revision
    base_name = check_mergeable(adapter, merge_adapters is not False)
    classes = auto_classes or adapter.auto_classes
    if (labels := adapter.labels()) is not None:
        base_kwargs.setdefault("num_labels", labels)
    with _named_by(adapter):
        base = _load_checkpoint(
            base_name, allow_missing_weights, base_kwargs, classes, limits, dequantize, adapter.brings
        )
    tokenizer = _stored_tokenizer(adapter)
    model = merge_stored(base.model, adapter, None if tokenizer is None else len(tokenizer))
    remember_folded(model, name, _source(from_pretrained_kwargs))
    base = replace(base, model=model, adapter=name)
    if tokenizer is None:  # the base's counts, which has a revision of its own
        return base
    return replace(base, processing_name=name, processing_kwargs=_source(from_pretrained_kwargs))


@contextmanager
def _named_by(adapter: AdapterSource) -> Iterator[None]:
    """What goes wrong with the base of an adapter, with who has named it: nobody typed that name."""
    try:
        yield
    except (OSError, ValueError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"{str(error).rstrip('.')}. {adapter.base!r} is the base that the adapter {adapter.name!r} names "
            "(base_model_name_or_path in its adapter_config.json): name another there, unquantised, or load both with "
            "PEFT and pass the PeftModel."
        ) from error


def _in_memory(model: nn.Module, merge_adapters: bool | None, given: Mapping[str, Any]) -> Loaded:
    if given:
        raise ValueError(
            f"{', '.join(given)} only make sense when a model is loaded by name; this {type(model).__name__} is loaded "
            "already."
        )
    if has_adapters(model):
        plain = merged_copy(model, merge_adapters is not False)
        adapter, stored_as = active_adapters(model), keep_dequantized(plain) or _stored_as(plain.config)
        return Loaded(plain, plain.name_or_path, adapter=adapter, stored_as=stored_as)
    if not isinstance(model, PreTrainedModel):
        inner = getattr(model, "module", None)
        unwrapped = f"; pass its .module, the {type(inner).__name__}" if isinstance(inner, PreTrainedModel) else ""
        raise ValueError(f"expected a model id, a folder or a PreTrainedModel, got {type(model).__name__}{unwrapped}.")
    compiled = next((name for name, module in model.named_modules() if hasattr(module, "_orig_mod")), None)
    if compiled is not None:  # its weights have other names than in a checkpoint
        raise ValueError(
            f"{compiled} of this {type(model).__name__} is compiled by itself: prune the model as it was before, and "
            "compile the result."
        )
    if "_original_forward" in vars(model):
        raise ValueError(
            f"Accelerate has prepared this {type(model).__name__} for mixed precision (a Trainer with bf16=True does), "
            "and its forward pass would go on in that, with rounded weights that are kept from step to step: save the "
            "model, and pass the folder or a model loaded from it."
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} was made under torch.inference_mode, and no gradient can be taken of its "
            "weights: load it outside."
        )
    if merge_adapters:
        raise ValueError(f"merge_adapters=True has no effect here: this {type(model).__name__} has no adapters.")
    forget_false_ties(model)
    return Loaded(model, model.name_or_path, stored_as=keep_dequantized(model) or _stored_as(model.config))


def _stored_tokenizer(adapter: AdapterSource) -> Any:
    """The tokenizer stored with an adapter, or None: then its base's counts."""
    # Asked first: for a folder without one, AutoTokenizer would go looking for a configuration that is not there.
    if not has_file(adapter.name, "tokenizer_config.json", adapter.where):
        return None
    return AutoTokenizer.from_pretrained(adapter.name, **adapter.where)


def _load_checkpoint(
    name: str,
    allow_missing: bool,
    from_pretrained_kwargs: dict[str, Any],
    auto_classes: Sequence[Any],
    limits: Limits,
    dequantize: bool,
    brought: Collection[str] = (),
) -> Loaded:
    """A model from its checkpoint.

    Args:
        brought: modules whose weights come from elsewhere.
    """
    config = load_config(name, **_source(from_pretrained_kwargs))
    check_dtype(from_pretrained_kwargs.get("dtype"), getattr(config, "dtype", None))
    if from_pretrained_kwargs.get("gguf_file") is not None:
        check_positions(name, config, _source(from_pretrained_kwargs))
    cls = chosen_class(config, auto_classes)
    kwargs = from_pretrained_kwargs | _of_gguf(from_pretrained_kwargs, config)
    if dequantize and "quantization_config" not in kwargs:
        check_stored_plain(name, config)
        kwargs |= made_plain(config)
    bare = partial(skeleton, config, cls, trust_remote_code=kwargs.get("trust_remote_code"))
    kwargs |= _planned(kwargs, bare, limits)
    stored_as = _stored_as(config, kwargs.get("gguf_file"))
    reinitialises = kwargs.get("ignore_mismatched_sizes", False)
    with ExitStack() as undo:
        scratch = None
        if _may_offload(kwargs):
            # transformers writes there what it cannot read from the checkpoint as it is, such as fused experts, by the
            # names of parameters: in one folder another process's would be read in their place.
            scratch = kwargs["offload_folder"] = scratch_folder("offload", kwargs.get("offload_folder"))
            undo.callback(remove_scratch, scratch)
        with load_errors(name, WEIGHTS, plain=dequantize):
            # Sizes that differ would be an error without a name in it; `check_complete` says which they are.
            kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
            with ignored_names() as ignored:
                model, loading = cls.from_pretrained(name, **kwargs)
        # Its companions and its card are those of this commit.
        remember_source(model, from_pretrained_kwargs)
        if getattr(model.config, "_commit_hash", None) is None:
            model.config._commit_hash = cached_commit(name, kwargs.get("gguf_file") or CONFIG_NAME, **kwargs)
        lacks = about_pooler(model, name, loading)
        if not allow_missing:
            check_complete(model, name, loading, reinitialises, brought)
        warnings = lacks + about_unused(model, name, loading, ignored)
        stored = None if stored_as else stored_dtype(model)
        if kwargs.get("dtype") in (None, "auto"):
            warnings += about_dtype(model, name, stored)
        elif not stored_as:
            stored = stored or getattr(config, "dtype", None)  # of other files the configuration is all that tells
        undo.pop_all()  # from here on the folder lives as long as the model
    if scratch is not None:
        weakref.finalize(model, remove_scratch, scratch)
    if "gguf_file" in kwargs:
        # The weights are plain now: a checkpoint saved from them must not claim to be a GGUF one.
        model.config.__dict__.pop("quantization_config", None)
    keep_dequantized(model)
    forget_false_ties(model)
    converted = stored not in (None, model.dtype)
    return Loaded(
        model,
        model.name_or_path,
        stored_as=stored_as,
        converted_from=str(stored).removeprefix("torch.") if converted else None,
        warnings=warnings,
        processing_kwargs=_source(from_pretrained_kwargs),
    )


def _of_gguf(given: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """What a GGUF file is loaded with, unless it is given; nothing for others."""
    if "gguf_file" not in given:
        return {}
    # To parse its header takes seconds, each time: the configuration is handed on.
    ours = {"quantization_config": GgufConfig(dequantize=True), "config": config}
    return {name: value for name, value in ours.items() if name not in given}


def _planned(given: Mapping[str, Any], bare: Callable[..., PreTrainedModel], limits: Limits) -> dict[str, Any]:
    """Where weights go, if that is asked for: a device map, and what each device may hold at most."""
    if (device_map := given.get("device_map")) is None:
        return {}
    device_map = _checked_map(device_map, bare)
    if device_map in PLANS and limits is not None and given.get("max_memory") is None:
        return {"device_map": device_map, "max_memory": limits(bare(dtype=given.get("dtype")))}
    return {"device_map": device_map}


def _may_offload(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("device_map") not in (None, {"": "cpu"})


def _stored_as(config: PreTrainedConfig, gguf_file: str | None = None) -> str | None:
    """The quantised type of a checkpoint's weights, now or before they were saved as they are.

    That of a GGUF file is in its name, by convention.
    """
    if gguf_file is not None:
        found = re.search(r"(?:^|[-._])([IT]?Q\d\w*|MXFP4|B?F16|F32)(?=[-.]|$)", Path(gguf_file).name, re.IGNORECASE)
        return found[1].upper() if found else "GGUF"
    quantised = getattr(config, "quantization_config", None) or {}
    values = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return values.get("quant_method") or _said_before(config).get("stored_as")


def _said_before(config: PreTrainedConfig) -> dict[str, Any]:
    """What a checkpoint of this package says of itself in its configuration; nothing of any other."""
    found = getattr(config, CONFIG_KEY, None)
    return found if isinstance(found, dict) else {}


def _has_zeros(model: PreTrainedModel, sparsity: float) -> bool:
    """Whether any matrix has about the zeros that are told of all: the first one that is looked at, as a rule.

    One that is zero throughout shows nothing: it may have yet to learn.
    """
    for target in find_targets(model, include=["*"]) if plain_uses(model) else ():
        matrix = target.matrix(model)
        zeros = sum(int((matrix[rows] == 0).sum()) for rows in row_chunks(matrix.shape))
        if sparsity / 2 * matrix.numel() <= zeros < matrix.numel():
            return True
    return False


def _source(from_pretrained_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in from_pretrained_kwargs.items() if name in SOURCE_KWARGS}


def _checked_map(device_map: DeviceMap, bare: Callable[[], PreTrainedModel]) -> DeviceMap:
    """The device map for `from_pretrained`, where "disk" stands for every module.

    Args:
        bare: makes the model without its weights.

    Raises:
        ValueError: a name that is no module of the model. Accelerate would ignore it.
    """
    if device_map == "disk":
        return {"": "disk"}
    if not isinstance(device_map, Mapping):
        return device_map
    names = [name for name, _ in bare().named_modules()]
    for wanted in device_map:
        if not isinstance(wanted, str):
            raise ValueError(f"device_map names modules, as in {{'model.layers': 'disk'}}, got {wanted!r}.")
        if wanted not in names and not any(name.startswith(f"{wanted}.") for name in names):
            near = difflib.get_close_matches(wanted, names, n=1)
            raise ValueError(
                f"device_map names {wanted!r}, but the model has no such module"
                + (f"; did you mean {near[0]!r}?" if near else f". Its modules are named like {', '.join(names[1:4])}.")
            )
    return dict(device_map)


def name_of(model_or_id: Any) -> str:
    """Where a model comes from, or nothing."""
    return str(getattr(model_or_id, "name_or_path", "") if isinstance(model_or_id, nn.Module) else model_or_id)


def folders_of(model_or_id: Any, source: Mapping[str, Any]) -> list[str]:
    """Names of what is read: the model's, and that of the `subfolder` which it is loaded from."""
    name, inside = name_of(model_or_id), source.get("subfolder")
    return [name, str(Path(name) / inside)] if name and inside else [name]


def load_config(name_or_path: str, **source: Any) -> PreTrainedConfig:
    """The configuration of a Hub id, a folder or a JSON file. No weight is fetched or read.

    Raises:
        OSError: no such model, a gated one, or no network; transformers' message and the remedies.
    """
    name_or_path = expanded_model(name_or_path)
    check_source(name_or_path, source, takes_file=True)
    folder = Path(name_or_path)
    if folder.is_dir() and not (folder / "config.json").is_file() and (adapter := stored_adapter(str(folder), {})):
        raise ValueError(f"{name_or_path!r} is an adapter for {adapter.base!r}, whose configuration counts: name that.")
    with load_errors(name_or_path):
        config = AutoConfig.from_pretrained(name_or_path, **source)
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            if isinstance(size := text_attribute(config, name, 1), int) and size < 1:
                raise ValueError(f"{name} is {size}, and must be 1 or more.")
        return config


def skeleton(
    config: PreTrainedConfig,
    cls: Any = None,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool | None = None,
    **init: Any,
) -> PreTrainedModel:
    """The model without its weights: every parameter and buffer on the meta device, in eval mode.

    Args:
        cls: its class; by default the one the checkpoint asks for.
        dtype: of the weights, or its name; by default the checkpoint's, or float32 if it names none.
        trust_remote_code: whether code of the checkpoint's own may run; None: transformers asks.
        init: what else a class of transformers is made with.

    Raises:
        ValueError: no such dtype.
    """
    stored = getattr(config, "dtype", None)
    stored = getattr(torch, stored) if isinstance(stored, str) else stored  # `save_pretrained` leaves a text there
    check_dtype(dtype, stored)
    dtype = (None if dtype == "auto" else dtype) or stored or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    cls = cls or model_class(config)
    with init_empty_weights(include_buffers=True):
        if issubclass(cls, PreTrainedModel):
            model = cls(config, **init)
        else:
            model = cls.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()  # `init_empty_weights` replaces each parameter by one of its own, and breaks the ties
    return model.to(dtype).eval()
