"""Block roles: what families call the matrices of a block that make and read its channels and heads.

Roles alone, apart from `families.py`, because the configuration and the command line read the table that needs them
before anything heavy is imported.
"""

from __future__ import annotations

# Feed-forward networks, by the roles of their matrices in a block: the one that reads the channels, and those that make
# them, each with how many rows it has for a channel: 2 where gate and up are one matrix, one after the other.
_FEED_FORWARDS: tuple[tuple[str, dict[str, int]], ...] = (
    ("mlp.down_proj", {"mlp.gate_proj": 1, "mlp.up_proj": 1}),
    ("mlp.down_proj", {"mlp.gate_up_proj": 2}),
    ("mlp.down_proj", {"mlp.up_proj": 1}),
    ("mlp.c_proj", {"mlp.c_fc": 1}),  # GPT-2, StarCoder2
    ("mlp.dense_4h_to_h", {"mlp.dense_h_to_4h": 1}),  # GPT-NeoX, Falcon
    ("mlp.fc2", {"mlp.fc1": 1}),  # Phi, ViT
    ("mlp.fc_out", {"mlp.fc_in": 1}),  # GPT-J, CodeGen
    ("feed_forward.w2", {"feed_forward.w1": 1, "feed_forward.w3": 1}),  # LFM2
    ("feed_forward.down_proj", {"feed_forward.gate_proj": 1, "feed_forward.up_proj": 1}),  # Falcon-H1
    ("fc2", {"fc1": 1}),  # OPT, BART
    ("output.dense", {"intermediate.dense": 1}),  # BERT
    ("feed_forward.output_dense", {"feed_forward.intermediate_dense": 1}),  # Wav2Vec2, HuBERT, WavLM
    ("ffn.lin2", {"ffn.lin1": 1}),  # DistilBERT
    ("mlp.Wo", {"mlp.Wi": 2}),  # ModernBERT
    *(  # T5: the second part of an encoder's block, the third of a decoder's
        (f"{network}.wo", {f"{network}.{maker}": 1 for maker in makers})
        for network in ("layer.1.DenseReluDense", "layer.2.DenseReluDense")
        for makers in (("wi_0", "wi_1"), ("wi",))
    ),
)
# Attention with a matrix each for queries, keys and values, by the role of the one that reads the heads.
_HEAD_READERS = ("self_attn.o_proj", "self_attn.dense", "self_attn.out_proj", "attention.o_proj")
_HEAD_MAKERS = ("q_proj", "k_proj", "v_proj")


def feed_forward_matrices(roles: frozenset[str]) -> tuple[str, dict[str, int]] | None:
    """Of a block's matrices the one that reads the channels of its feed-forward network, and those that make them."""
    return next(((reader, makers) for reader, makers in _FEED_FORWARDS if {reader, *makers} <= roles), None)


def attention_matrices(roles: frozenset[str]) -> tuple[str, dict[str, int]] | None:
    """Of a block's matrices the one that reads its heads, and those that make queries, keys and values."""
    for reader in _HEAD_READERS:
        makers = dict.fromkeys((f"{reader.rpartition('.')[0]}.{maker}" for maker in _HEAD_MAKERS), 1)
        if {reader, *makers} <= roles:
            return reader, makers
    return None
