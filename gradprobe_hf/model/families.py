"""Families: every fact about model architectures that the package relies on.

What experts, blocks and decoders are called, which loss a model is trained with, what a batch of it looks like. A new
family that differs in any of these is a change to this file alone, or to one of the two that need nothing heavy: roles
of matrices (`block_roles.py`), and names in configurations (`config_names.py`).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from gradprobe_hf.model.config_names import text_attribute
from gradprobe_hf.tasks.columns import IGNORED
from gradprobe_hf.tasks.image_texts import sees_prefix_whole

CAUSAL = "ForCausalLM"
ANY_SIZE = 512  # what is assumed of images where a model takes any, in pixels
# Cross-attention: T5, BART and their like, BERT and GPT-2 as decoders. Keys and values come from the encoder's tokens.
_CROSS_ATTENTION = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attention", "cross_attn")
_MERGED_ATTENTION = ("t5gemma2",)  # types of configuration whose decoder makes keys and values of both with one map
# Parts of module names -> what readers call that part of a model.
_TOWERS = {
    **dict.fromkeys(("vision_tower", "vision_model", "visual", "vision_encoder", "image_encoder"), "vision"),
    **dict.fromkeys(("language_model", "text_model", "llm"), "text"),
    **dict.fromkeys(("audio_tower", "audio_encoder", "speech_encoder"), "audio"),
    "encoder": "encoder",
    "decoder": "decoder",
}
_KEYS_AND_VALUES = ("k", "v", "k_proj", "v_proj", "key", "value", "key_proj", "value_proj", "c_attn")
# Where the tokens of a multimodal model are patches of images or frames of sound, whatever mask there is for its text.
_WITHOUT_TEXT = ("vision_model", "vision_tower", "vision_encoder", "visual", "audio_tower")
# Linear maps that the module around them multiplies with by itself: class of that module -> their names in it.
_READ_BY_PARENT = {
    "MambaMixer": ("dt_proj",),
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "TDNNLayer": ("kernel",),  # wav2vec 2.0's x-vectors
    "WavLMAttention": ("q_proj", "k_proj", "v_proj", "out_proj"),  # by F.multi_head_attention_forward
    "MultiheadAttention": ("out_proj",),  # torch's own
}
# Types of configuration of whose maps fused kernels take the weight, so that the module itself never runs.
_WITH_FUSED_KERNELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_TAKEN_BY_KERNELS = ("out_proj", "conv1d")
# Types of configuration of what is computed on [tokens, sequences, features].
_TIME_FIRST = ("fsmt", "xlnet", "longformer", "led")
# Types with maps of relative places, which all rows of a batch share (DeBERTa's only where `relative_attention` says
# so), or of windows or patches of all rows in one.
_SHARED_BY_ROWS = ("deberta", "deberta-v2", "swin", "swinv2", "donut-swin", "maskformer-swin", "swin2sr", "mobilevit")
# Types that pad what they are given on the right, to a multiple of their windows, in front of the first block.
_WIDENING = ("longformer", "led", "big_bird", "bigbird_pegasus", "pegasus_x")
# Types that read the patches of an image behind the tokens of a text.
_WITH_PATCHES_BEHIND = ("vilt", "layoutlmv3")
# Types that compute with padding, whatever a mask says: means over all samples, convolutions and means over tokens.
_WITHOUT_REGARD_TO_MASKS = (
    *("moonshine", "sew", "sew-d", "data2vec-audio", "speech_to_text", "wav2vec2-conformer"),
    *("convbert", "funnel", "mobilebert", "nystromformer", "yoso"),
)
# What models of sound tell their frames by, and mask them with, which only those have that are masked.
_FRAME_LENGTHS = (
    ("_get_feat_extract_output_lengths", "_get_feature_vector_attention_mask"),
    ("_get_subsampling_output_length", "_get_output_attention_mask"),  # Parakeet
)
# Classes whose loss is of the tokens that the mask has, -100 or not.
_MASKING_LABELS = (
    "ElectraForPreTraining",
    "FunnelForPreTraining",
    *(f"{family}ForTokenClassification" for family in ("BioGpt", "Mra", "XLMRobertaXL", "Yoso")),
)
# Types of encoder-decoders that make what their decoder is given of the source, not of the labels.
_COPYING = ("fsmt",)
# Classes that decode with `decoder_input_ids` or labels, though their configuration is of no encoder-decoder.
_DECODING = ("BlipForQuestionAnswering",)
# Decoders whose own loss compares the output at each token with the label there, so that labels are the next tokens.
_UNSHIFTING = (
    *(f"{family}ForCausalLM" for family in ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt")),
    *(f"{family}ForCausalLM" for family in ("MBart", "Marian", "Musicgen", "MusicgenMelody", "Mvp", "PLBart")),
    *(f"{family}ForCausalLM" for family in ("Pegasus", "ProphetNet", "TrOCR", "Whisper")),
    "XLNetLMHeadModel",
    "XLMWithLMHeadModel",
)
# Types of causal language models that see ahead by a setting of theirs, and what to set.
_SEEING_AHEAD = {
    "bert-generation": ("is_decoder", False, "is_decoder=True"),
    "xlm": ("causal", False, "causal=True"),
    "xlnet": ("attn_type", "bi", "attn_type='uni'"),
}
_SUMMING = ("Wav2Vec2ForPreTraining", "Wav2Vec2ConformerForPreTraining")
_PAIRED = ("clip", "siglip", "siglip2", "align", "altclip", "chinese_clip", "groupvit")  # of a text beside an image
# Names by which models take what they keep of a text; from transformers 5.24 on most of them call it "cache".
_CACHES = ("past_key_values", "cache_params", "state", "cache")
# What numbers are called that make a model random in training. PhiMoE's `router_jitter_noise` has a part in evaluation.
_RANDOM = re.compile(r"dropout|layerdrop|_pdrop$|^(input_)?jitter_noise$|jitter_eps$")
# Parts of the names of what chooses experts, or streams (AltUp's coefficients in Gemma 3n, 4 x 4). Its few rows say
# where every token goes: no matrix to take half of. Beside experts a "gate" is that, too.
_CHOOSING = ("router", "modality_router", "shared_expert_gate", "altup")
# Parts of the names of heads that are stacks of layers themselves: of detectors, of segmentation. Heads that are whole
# networks (`flow_head`, `diffusion_head` of speech) are none of them.
_HEADS = re.compile(
    r"(.*_)?((bbox|class)_embed|bbox_predictor|classifier|lm_heads?|mask_embedder|output_hypernetworks_mlps"
    r"|(auxiliary|bbox|decode|order|points?|pos|prediction|query|score)_head)|head"
)
_WITH_MEDIA = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(), *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}
_NEVER_WITHOUT = ("VoxtralRealtimeForConditionalGeneration",)  # of these, what want their medium with every token
_PLACES = ("bbox", "xpath_tags_seq")  # what says where on its page a token stands
_MEDIA = ("pixel_values", "input_features", "input_values")  # what images and recordings are called
_PLAIN = ("FalconLinear",)  # subclasses of nn.Linear whose own forward computes the same, x W^T + b


def objective(model: PreTrainedModel) -> str | None:
    """What the model is trained for, as transformers names its losses: "ForCausalLM", "ForMaskedLM", ..."""
    # `loss_type` is derived from the class name, which says nothing for GPT-2's `GPT2LMHeadModel`; the auto mapping
    # knows it. FSDP2 prefixes the class name of what it shards.
    name = type(model).__name__.removeprefix("FSDP")
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or _reads_media_or_none(model, name):
        return CAUSAL
    return getattr(model, "loss_type", None)


def _reads_media_or_none(model: PreTrainedModel, name: str) -> bool:
    """Whether it is a language model that also sees or hears, and reads text alone as others do: Qwen3.5, Voxtral.

    Not BLIP-2, which wants an image, nor PaliGemma, which without labels takes all it reads for a question.
    """
    if name not in _WITH_MEDIA or name in _NEVER_WITHOUT or sees_prefix_whole(model.config):
        return False
    takes = inspect.signature(type(model).forward).parameters
    may_do_without = any(medium in takes and takes[medium].default is None for medium in _MEDIA)
    return may_do_without and "labels" in takes and not model.config.is_encoder_decoder


def is_causal(model: PreTrainedModel) -> bool:
    """Whether the model predicts the next token from the ones before it."""
    return objective(model) == CAUSAL and not model.config.is_encoder_decoder


def sees_ahead(model: PreTrainedModel) -> tuple[str, str] | None:
    """Why each token of a causal language model sees those that it is to predict, and what to do; None: none does."""
    kind = model.config.model_type
    if not is_causal(model):
        return None
    if kind == "cpmant":
        return "because it reads all of a text as what is known", "Choose another model"
    if kind in _SEEING_AHEAD:
        name, value, remedy = _SEEING_AHEAD[kind]
    elif kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        name, value, remedy = "is_decoder", False, "is_decoder=True, or as a masked language model"
    else:
        return None
    is_so = getattr(model.config, name, None) == value
    return (f"because config.{name} is {value!r}", f"Load it with {remedy}") if is_so else None


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether the model's own loss compares the output at token t with the label of token t + 1."""
    # Vision-language models are decoder-only and called ForConditionalGeneration, like encoder-decoders, whose labels
    # are aligned already.
    if type(model).__name__.removeprefix("FSDP") in _UNSHIFTING:
        return False
    return objective(model) in (CAUSAL, "ForConditionalGeneration") and not model.config.is_encoder_decoder


def names_causal_class(architecture: str) -> bool:
    """Whether a checkpoint's architecture is a causal language model, as is assumed for one that names none."""
    return not architecture or architecture.endswith(("ForCausalLM", "LMHeadModel"))


def ignored_label(model: PreTrainedModel) -> int:
    """The label that the model's own loss leaves out: 255 marks the void of a segmented image."""
    segments = type(model).__name__.endswith("ForSemanticSegmentation")
    names = ("semantic_loss_ignore_index", "loss_ignore_index")  # the second is UperNet's
    known = (getattr(model.config, name, None) for name in names)
    return next((int(one) for one in known if one is not None), IGNORED) if segments else IGNORED


def leaves_out_padding(model: PreTrainedModel) -> bool:
    """Whether the model's own loss leaves out the labels of padding by the mask, whatever they are."""
    return type(model).__name__ in _MASKING_LABELS


def makes_decoder_inputs_of_source(model: PreTrainedModel) -> bool:
    """Whether a decoder is given the source where it is given nothing else, not the labels."""
    return model.config.model_type in _COPYING


def decodes_labels(model: PreTrainedModel) -> bool:
    """Whether a decoder's inputs are made of the labels, so that there is no forward pass without them."""
    return model.config.is_encoder_decoder or embeds_labels(model)


def embeds_labels(model: PreTrainedModel) -> bool:
    """Whether labels are the decoder's inputs as they are, -100 among them."""
    return type(model).__name__ in _DECODING


def chooses_among_texts(model: PreTrainedModel) -> bool:
    """Whether a row has several texts `[rows, choices, tokens]`, and its label is the number of one."""
    return type(model).__name__.endswith("ForMultipleChoice")


def answers_by_position(model: PreTrainedModel) -> bool:
    """Whether labels are where in the text an answer begins and ends."""
    return "start_positions" in forward_arguments(model)


def feels_padding(model: PreTrainedModel) -> bool:
    """Whether padding changes what is computed of a row, whatever a mask says.

    An answer's position is one of all that a batch has, padding among them; FNet takes no mask; wav2vec 2.0's adapter,
    where a model has one, is a convolution without any.
    """
    takes = forward_arguments(model)
    unmasked = "input_ids" in takes and "attention_mask" not in takes
    ignores_masks = model.config.model_type in _WITHOUT_REGARD_TO_MASKS or bool(
        getattr(model.config, "add_adapter", False)
    )
    return answers_by_position(model) or unmasked or ignores_masks


def is_transducer(model: PreTrainedModel) -> bool:
    """Whether labels are what a transducer writes, whose loss leaves out pad tokens by itself."""
    return type(model).__name__.endswith(("ForRNNT", "ForTDT"))


def transcribes_freely(model: PreTrainedModel) -> bool:
    """Whether the loss is CTC: one of each sequence as a whole, with labels that are aligned with nothing."""
    return type(model).__name__.endswith("ForCTC")


def forward_arguments(model: PreTrainedModel) -> frozenset[str]:
    """What a model is called with, by name; none where its forward passes on whatever it is given."""
    # Of the class: Accelerate hangs a wrapper that takes anything on an offloaded model.
    _, *found = inspect.signature(type(model).forward).parameters.values()
    return frozenset(one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def place_argument(model: PreTrainedModel) -> str | None:
    """The name by which a model is told where each token stands on its page; None: it reads text alone."""
    return next((name for name in _PLACES if name in forward_arguments(model)), None)


def sums_own_loss(model: PreTrainedModel) -> bool:
    """Whether the model's own loss is a sum over the batch already, not a mean."""
    sums = transcribes_freely(model) and getattr(model.config, "ctc_loss_reduction", "mean") == "sum"
    return sums or type(model).__name__ in _SUMMING


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    """The argument that keeps a model from making a key-value cache; none for a model that has no such argument.

    A decoder that classifies makes one, too, and blocks that are recomputed append to it once more.
    """
    takes = inspect.signature(type(model).forward).parameters
    hands_on = "past_key_values" in takes and any(one.kind is one.VAR_KEYWORD for one in takes.values())
    has_one = "use_cache" in takes or hands_on or model.config.is_encoder_decoder or model.can_generate()
    return {"use_cache": False} if has_one else {}


def cache_name(model: PreTrainedModel) -> str | None:
    """The name by which a model takes what it keeps of a text, and returns it; None: it keeps nothing."""
    takes = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in takes), None)


def needs_pairs(model: PreTrainedModel) -> bool:
    """Whether a text is nothing to the model without an image beside it."""
    if model.main_input_name != "input_ids":  # CLIP's classifier of images
        return False
    name = type(model).__name__.removeprefix("FSDP")
    return model.config.model_type in _PAIRED or name in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()


def computes_time_first(model: PreTrainedModel) -> bool:
    """Whether modules are called with [tokens, sequences, features].

    Nothing else tells them from the others where a batch has as many rows as tokens.
    """
    return getattr(model.config, "model_type", "") in _TIME_FIRST


def mixes_rows(model: PreTrainedModel) -> bool:
    """Whether some map is called with a tensor in which the rows of a batch cannot be told apart."""
    within = (getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", ()))
    return any(
        getattr(config, "model_type", "") in (*_TIME_FIRST, *_SHARED_BY_ROWS)
        and getattr(config, "relative_attention", True)
        for config in (model.config, *within)
    )


def makes_random(name: str) -> bool:
    """Whether a number of this name, of a module or a configuration, makes a model random in training."""
    return _RANDOM.search(name) is not None


def labels_whole_sequences(model: PreTrainedModel) -> bool:
    """Whether a batch has one label for each sequence, not for each token."""
    return type(model).__name__.endswith(("ForSequenceClassification", "ForMultipleChoice"))


def block_of(model: nn.Module, module_name: str) -> str:
    """The transformer block around a module, like `model.layers.3`; `""` outside the blocks."""
    # The outermost element of an nn.ModuleList: the experts of a mixture may be a ModuleList inside it. Of a list of
    # lists (PVT's stages) an inner element, since a list is never called.
    parts = module_name.split(".")
    for depth, part in enumerate(parts):
        around, block = ".".join(parts[:depth]), ".".join(parts[: depth + 1])
        is_element = part.isdigit() and isinstance(model.get_submodule(around), nn.ModuleList)
        if is_element and not isinstance(model.get_submodule(block), nn.ModuleList):
            return block
    return ""


def stack_of(block: str) -> str:
    """The `nn.ModuleList` of a block: a decoder has one, an encoder-decoder two."""
    return block.rsplit(".", 1)[0]


def tower_names(stacks: Sequence[str]) -> dict[str, str]:
    """What the stacks of blocks of one model are called: "vision", "text", "encoder", ...; a single one nothing.

    >>> tower_names(["model.vision_tower.encoder.layers", "model.language_model.layers"])
    {'model.vision_tower.encoder.layers': 'vision', 'model.language_model.layers': 'text'}
    >>> tower_names(["decoder.layers"]), tower_names(["a.layers", "b.layers"])
    ({'decoder.layers': ''}, {'a.layers': 'a', 'b.layers': 'b'})
    """
    if len(stacks) < 2:
        return dict.fromkeys(stacks, "")
    paths = [stack.split(".") for stack in stacks]
    shared = next(depth for depth in range(len(paths[0]) + 1) if len({tuple(p[: depth + 1]) for p in paths}) > 1)
    names = [next((_TOWERS[part] for part in path[shared:] if part in _TOWERS), "") for path in paths]
    # Two stacks of one tower, or none that is known: the part of the path that tells them apart.
    return {
        stack: name if name and names.count(name) == 1 else ".".join(path[shared:-1]) or path[-1]
        for stack, path, name in zip(stacks, paths, names, strict=True)
    }


def shares_keys_across_blocks(model: nn.Module) -> bool:
    """Whether blocks read keys and values that other blocks have computed (Gemma 3n): none can be run by itself."""
    shared = "num_kv_shared_layers"
    return isinstance(model, PreTrainedModel) and bool(getattr(model.config.get_text_config(), shared, None))


def in_decoder(module: str) -> bool:
    """Whether a module of an encoder-decoder sees the decoder's tokens. Keys and values of cross-attention do not.

    >>> [in_decoder(f"decoder.block.0.layer.{name}") for name in ("0.SelfAttention.k", "1.EncDecAttention.k")]
    [True, False]
    >>> in_decoder("text_decoder.layers.0.self_attn.k_proj")  # SeamlessM4T
    True
    """
    parts = module.split(".")
    crossing = any(part in _CROSS_ATTENTION for part in parts)
    inside = any(part in ("decoder", "text_decoder") for part in parts)
    return inside and not (crossing and parts[-1] in _KEYS_AND_VALUES)


def merges_attention(model: PreTrainedModel) -> bool:
    """Whether a decoder makes keys and values of its own tokens and of the encoder's with the same maps."""
    return model.config.model_type in _MERGED_ATTENTION


def frame_mask(model: PreTrainedModel, mask: torch.Tensor, frames: int) -> torch.Tensor | None:
    """Which of the frames that a model of sound makes of samples are of no padding, bool `[sequences, frames]`.

    None for a model that makes none, that hears silence as sound (Whisper), or that makes another number of them.

    Args:
        mask: False at padding of the samples, bool `[sequences, samples]`.
    """
    lengths_of = _lengths_of(model, is_masked=True)
    if lengths_of is None:
        return None
    if "add_adapter" in inspect.signature(lengths_of).parameters:
        lengths_of = partial(lengths_of, add_adapter=False)  # which comes behind all blocks
    whole, squeezed = int(lengths_of(torch.tensor([mask.shape[1]]))), getattr(model.config, "squeeze_factor", 1)
    if frames not in (whole, whole // squeezed):
        return None
    found = torch.arange(whole, device=mask.device) < lengths_of(mask.sum(1)).to(mask.device)[:, None]
    if frames != whole:  # SEW's blocks see several frames as one, which counts where any of them does
        found = nn.functional.max_pool1d(found.float(), squeezed).bool()
    return found


def frame_counts(model: PreTrainedModel, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """How many frames a model of sound makes of each recording of a batch, `[rows]`; None: it does not say."""
    lengths_of = _lengths_of(model)
    heard = batch.get(model.main_input_name)
    if lengths_of is None or not isinstance(heard, torch.Tensor):
        return None
    mask = batch.get("attention_mask")
    rows, samples = heard.shape[:2]
    lengths = mask.sum(1) if isinstance(mask, torch.Tensor) else torch.full((rows,), samples)
    found = lengths_of(lengths)
    return found if isinstance(found, torch.Tensor) else None


def _lengths_of(model: PreTrainedModel, is_masked: bool = False) -> Any:
    """What tells the frames of so many samples; None: nothing does.

    Args:
        is_masked: only of a model that masks frames of padding.
    """
    for part in model.modules():
        for lengths, mask in _FRAME_LENGTHS:
            if hasattr(part, lengths) and (hasattr(part, mask) or not is_masked):
                return getattr(part, lengths)
    return None


def widens_inputs(model: PreTrainedModel) -> bool:
    """Whether blocks may see more tokens than a text has: padding that the model adds by itself, or an image's."""
    return model.config.model_type in (*_WIDENING, *_WITH_PATCHES_BEHIND)


def widened_mask(model: PreTrainedModel, mask: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """A mask `[sequences, tokens]` with what blocks see behind a text; None where there are fewer tokens.

    Padding does not count, and patches do.
    """
    behind = model.config.model_type in _WITH_PATCHES_BEHIND
    return nn.functional.pad(mask, (0, tokens - mask.shape[1]), value=behind) if tokens > mask.shape[1] else None


def is_in_tower(module: str) -> bool:
    """Whether a module of a multimodal model sees an image, or hears a recording, and reads no text."""
    return any(part in _WITHOUT_TEXT for part in module.split("."))


def is_read_by_parent(model: nn.Module, name: str) -> bool:
    """Whether a module's own forward is never called: the module around it uses its weight.

    Nothing could be measured of such a weight, so it is no target.
    """
    parent, _, child = name.rpartition(".")
    return child in _READ_BY_PARENT.get(type(model.get_submodule(parent)).__name__, ())


def is_taken_by_kernels(model: PreTrainedModel, name: str) -> bool:
    """Whether fused kernels take a weight, by its name, from its module, which then never runs."""
    return model.config.model_type in _WITH_FUSED_KERNELS and name.split(".")[-2] in _TAKEN_BY_KERNELS


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a module does with its weight what this class of torch or transformers does.

    A subclass with a forward of its own may do something else: measuring it would be wrong.
    """
    own = type(module)
    return isinstance(module, cls) and (own.forward is cls.forward or own.__name__ in _PLAIN)


def is_choosing(model: nn.Module, name: str) -> bool:
    """Whether a module is, or belongs to, what chooses the experts or streams that a token is sent to."""
    parts = name.split(".")
    gates = (model.get_submodule(".".join(parts[:depth])) for depth, part in enumerate(parts) if part == "gate")
    return any(part in _CHOOSING for part in parts) or any(
        is_expert(beside) for around in gates for beside, _ in around.named_children()
    )


def is_head(model: nn.Module, name: str) -> bool:
    """Whether a module makes logits of tokens, or belongs to a head of boxes, classes or pixels.

    Of several that stand in a list (MusicGen), or of one that is a list (YOLOS), each looks like a block.
    """
    heads = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    makes_logits = isinstance(heads, nn.Module) and model.get_submodule(name) in heads.modules()
    return makes_logits or any(_HEADS.fullmatch(part) for part in stack_of(block_of(model, name)).split("."))


def is_expert(name: str) -> bool:
    """Whether a matrix belongs to an expert, which is sent tokens of any sequence in any order."""
    return any("expert" in part for part in name.split("."))


def expert_kind(name: str) -> str:
    """A matrix's name without the number of its expert: the same for all experts of a mixture.

    >>> [expert_kind(f"layers.3.mlp.{name}") for name in ("experts.7.up_proj", "up_proj")]
    ['layers.3.mlp.experts.*.up_proj', 'layers.3.mlp.up_proj']
    """
    parts = name.split(".")
    pairs = zip(["", *parts], parts, strict=False)
    return ".".join("*" if part.isdigit() and "expert" in before else part for before, part in pairs)


def is_compared_by_token(name: str) -> bool:
    """Whether a matrix sees the same tokens in the pruned and in the dense model.

    A router may send an expert other tokens there; a shared expert is sent all of them.
    """
    return not is_expert(name) or "shared" in name


def is_fused_experts(module: nn.Module) -> bool:
    """Experts as transformers fuses them (transformers/integrations/moe.py, `use_experts_implementation`)."""
    described = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts"))
    return described and not getattr(module, "_is_expert_parallel", False)


def expert_parameters(module: Any) -> tuple[str, str]:
    """Names of the fused parameters, in the order in which a token passes them."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def longest_text(model: PreTrainedModel) -> int | None:
    """Tokens in the longest text that a model has positions for; None: it does not say.

    RoBERTa and what descends from it number positions from behind the padding token's own number: of the 514 that the
    configuration tells, the first two are no token's.
    """
    positions = text_attribute(model.config, "max_position_embeddings")
    if positions is None or positions < 0:  # XLNet says -1
        return None
    rows = (getattr(one, "position_embeddings", None) for one in model.modules())
    unused = (one.padding_idx + 1 for one in rows if isinstance(one, nn.Embedding) and one.padding_idx is not None)
    return int(positions) - max(unused, default=0)


def tokens_of_an_image(model: PreTrainedModel) -> int | None:
    """What a model that reads images makes of each: patches, and one more; None of any other, or of unlike blocks."""
    config = getattr(model.config, "vision_config", model.config)
    side, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if model.main_input_name != "pixel_values" or hasattr(config, "depths"):
        return None
    return (side // patch) ** 2 + 1 if isinstance(side, int) and isinstance(patch, int) else None


def sample_batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch on the meta device that the model returns a loss for: text, image or speech, with labels.

    Raises:
        ValueError: a model of something else, or of speech in a form that is not known here.
    """
    config, name = model.config, model.main_input_name
    if name == "pixel_values":
        per_pixel = type(model).__name__.endswith("ForSemanticSegmentation")
        written = (length,) if config.is_encoder_decoder else ()
        images = _images(model, rows)
        return {name: images, "labels": _ids(rows, *images.shape[2:]) if per_pixel else _ids(rows, *written)}
    if name == "input_features":
        tokens = min(length, getattr(config, "max_target_positions", length)) if config.is_encoder_decoder else 2
        labels = _ids(rows) if _is_classifier(model) else _ids(rows, tokens)
        return {name: _values(model, rows, *_features_of_speech(model, length)), "labels": labels}
    if name == "input_values" and hasattr(config, "conv_stride"):  # sound as it is, of which convolutions make tokens
        samples = math.prod(config.conv_stride) * length + sum(config.conv_kernel)
        return {name: _values(model, rows, samples), "labels": _ids(rows) if _is_classifier(model) else _ids(rows, 2)}
    if name == "input_values" and hasattr(config, "num_mel_bins"):
        return {name: _values(model, rows, config.max_length, config.num_mel_bins), "labels": _ids(rows)}
    if is_causal(model):
        return {"input_ids": _ids(rows, length)}
    if needs_pairs(model):
        return {"input_ids": _ids(rows, min(length, longest_text(model) or length)), _MEDIA[0]: _images(model, rows)}
    if "input_ids" not in forward_arguments(model) and type(model).forward.__module__.startswith("transformers."):
        raise ValueError(f"no batch can be made up for a {type(model).__name__}, which takes {name}.")
    measures = getattr(config, "problem_type", None) == "regression" and config.num_labels > 1
    whole = _ids(rows, config.num_labels) if measures else _ids(rows)
    labels = whole if labels_whole_sequences(model) else _ids(rows, length)
    texts = (2,) if chooses_among_texts(model) else ()
    return {"input_ids": _ids(rows, *texts, length), "labels": labels}


def _images(model: PreTrainedModel, rows: int) -> torch.Tensor:
    """Pixels `[rows, channels, height, width]`."""
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", model.config)
    side = getattr(vision, "image_size", ANY_SIZE)
    size = side if isinstance(side, (list, tuple)) else (side, side)
    return _values(model, rows, getattr(vision, "num_channels", 3), *size)


def _features_of_speech(model: PreTrainedModel, length: int) -> tuple[int, int]:
    """The shape of what an extractor makes of one recording, of which an encoder makes `length` tokens."""
    config = model.config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):  # Whisper: all that it can hear
        return config.num_mel_bins, 2 * config.max_source_positions  # its convolutions have a stride of two
    if hasattr(config, "input_feat_per_channel"):  # Speech2Text: as many convolutions of that stride
        return 2**config.num_conv_layers * length, config.input_feat_per_channel * config.input_channels
    if hasattr(config, "feature_projection_input_dim"):  # Wav2Vec2-BERT, SeamlessM4T
        return length, config.feature_projection_input_dim
    raise ValueError(
        f"no batch can be made up for a {type(model).__name__}: which shape the features have that it takes of speech "
        "is not known."
    )


def random_batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """A batch without labels, always the same: what two models are told apart by."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    vocabulary = text_attribute(model.config, "vocab_size", 2)
    for name, tensor in sample_batch(model, rows, length).items():
        if name != "labels" and tensor.is_floating_point():
            found[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        elif name != "labels":
            found[name] = torch.randint(vocabulary, tensor.shape, generator=generator)
    if model.config.is_encoder_decoder:  # without labels it does not make them itself
        found["decoder_input_ids"] = torch.randint(vocabulary, (rows, length), generator=generator)
    # Code of its own may not do without, where that of transformers makes one.
    is_known = type(model).forward.__module__.startswith("transformers.")
    if "input_ids" in found and not is_known and "attention_mask" in forward_arguments(model):
        found["attention_mask"] = torch.ones_like(found["input_ids"])
    return found


def _is_classifier(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def _values(model: PreTrainedModel, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=model.dtype, device="meta")
