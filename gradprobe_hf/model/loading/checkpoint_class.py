"""The class of a checkpoint: what its configuration says it was saved as -> what loads it.

A class that is guessed may have another head: where the embeddings are tied nothing is missing then, and the head that
was saved is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForTextEncoding, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from gradprobe_hf.model.families import names_causal_class


def model_class(config: Any) -> Any:
    """The class the checkpoint was saved as; a causal language model if it names none, or none that is known.

    Of code of its own it is the Auto class that its `auto_map` has for that.
    """
    architecture = _architecture(config)
    named = getattr(transformers, architecture, None)
    if (named is None or _is_own(config)) and (auto := _mapped_class(config, architecture)) is not None:
        return auto
    if named is not None and issubclass(named, PreTrainedModel) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return named
    return AutoModelForCausalLM if names_causal_class(architecture) or named is None else named


def chosen_class(config: PreTrainedConfig, auto_classes: Sequence[Any]) -> Any:
    """What loads the weights: the Auto class that knows the configuration; of none, the checkpoint's own class.

    Of several the first does, unless what it is asked for is the encoder of an encoder-decoder: `AutoModel` has both.

    Raises:
        ValueError: none of them knows it, or nobody can tell what the checkpoint's own class is.
    """
    if not auto_classes:
        _check_known(config)
        return model_class(config)
    knowing = [one for one in auto_classes if _knows(one, config)]
    if not knowing:
        raise ValueError(
            f"a {type(config).__name__} is none of {' or '.join(one.__name__ for one in auto_classes)}, as the task "
            "asks for: leave task out (--task), or name the one that the model is for."
        )
    has_decoder = config.is_encoder_decoder or _architecture(config).endswith("EncoderModel")
    return AutoModelForTextEncoding if has_decoder and AutoModelForTextEncoding in knowing else knowing[0]


def _check_known(config: PreTrainedConfig) -> None:
    """Raise ValueError where to take a checkpoint for a causal language model would be a guess."""
    architecture, cls = _architecture(config), model_class(config)
    if cls is not AutoModelForCausalLM or hasattr(transformers, architecture):
        return
    remedy = "say what the model is for with task (--task), or load it in Python and pass the model."
    if not _knows(cls, config):
        raise ValueError(
            f"config.json names {architecture or 'no class'} (architectures), and a {type(config).__name__} is no "
            f"causal language model: {remedy}"
        )
    # With code of its own, what has no head in its name is what that code has for a causal language model.
    is_base = _is_own(config) and "For" not in architecture
    if not (names_causal_class(architecture) or is_base or _mapped_class(config, architecture)):
        raise ValueError(
            f"config.json names {architecture} (architectures), a class that transformers does not know: {remedy}"
        )


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [""])[0])


def _is_own(config: Any) -> bool:
    """Whether the class of a configuration is none of transformers."""
    return not type(config).__module__.startswith("transformers.")


def _auto_map(config: Any) -> dict[str, Any]:
    """Auto class -> the class of the checkpoint's own code that it loads."""
    found = getattr(config, "auto_map", None)
    return found if isinstance(found, dict) else {}


def _mapped_class(config: Any, architecture: str) -> Any:
    """The Auto class that loads a class of the checkpoint's own code; None: it has none for it."""
    names = [name for name, own in _auto_map(config).items() if str(own).rpartition(".")[2] == architecture]
    # Without trust AutoModel would be the transformers class, and leave a head out.
    names.sort(key=lambda name: name == "AutoModel")
    return next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)


def _knows(auto: Any, config: Any) -> bool:
    return type(config) in auto._model_mapping or auto.__name__ in _auto_map(config)
