"""Names of DeepSeek-V4's tensors in published checkpoints, in checkpoints of transformers, and in the model."""

import re

from dsa_layers.errors import CheckpointError

# (pattern, replacement) for `re.sub`, in this order: from a name in a checkpoint to the name in the model.
RENAMES = [
    # From transformers' module names to published names. A checkpoint may have a mixture of both.
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.compressor\.indexer\.(q_b_proj\.|scorer\.)", r".indexer.\1"),
    (r"\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    # From published names to the model's names.
    (r"^mtp\.0\.(?=(e_proj|h_proj|enorm|hnorm|norm|hc_head)[._])", "drafter."),
    (r"^mtp\.0\.", "drafter.block."),
    (r"\bhc_head(_|\.hc_)", "hc_head."),
    (r"\.hc_(attn|ffn)_", r".hc_\1."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.wo_a\.", ".wo_a.matrices."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"(?<!\bhc_head)(?<!hc_attn)(?<!hc_ffn)\.scale$", ".weight_scale_inv"),
]

# (pattern, replacement) for `re.sub`, in this order: from a name in the model to the published name.
PUBLISHED_NAMES = [
    (r"^drafter\.(block\.)?", "mtp.0."),
    (r"\bhc_head\.", "hc_head_"),
    (r"\.hc_(attn|ffn)\.", r".hc_\1_"),
    (r"\.wo_a\.matrices\.", ".wo_a."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
    (r"\.weight_scale_inv$", ".scale"),
]

# Prefixes of tensors that the multi-token-prediction layer shares with the model. Some checkpoints store copies.
COPIES = ("mtp.0.emb.", "mtp.0.embed.", "mtp.0.head.")

# (pattern, variant): a tensor name that matches the pattern shows that the checkpoint is of an unsupported variant.
VARIANTS = [
    (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\.", "the DSpark drafter"),
    (r"\.engram\.|\.attn\.indexer\.(wk|k_norm)\.", "DeepSeek-V4.1"),
]


def name_of(stored: str) -> str:
    """Return the model's name for a tensor of the checkpoint. Raise CheckpointError if the tensor belongs to an
    unsupported variant."""
    variant = _variant(stored)
    if variant is not None:
        raise CheckpointError(f"belongs to {variant}, which is not supported")
    for pattern, name in RENAMES:
        stored = re.sub(pattern, name, stored)
    return stored


def stored_name(name: str, mtp_layer: int = 0) -> str:
    """Return the published name for a tensor of the model; the inverse of `name_of` for published names.

    mtp_layer: the index of the multi-token-prediction layer for the drafter's tensors
    """
    for pattern, stored in PUBLISHED_NAMES:
        name = re.sub(pattern, stored, name)
    return re.sub(r"^mtp\.0\.", f"mtp.{mtp_layer}.", name)


def skips(name: str, *, drafter: bool) -> bool:
    """Return whether a checkpoint tensor is in a multi-token-prediction layer and no drafter reads it. Return False for
    a tensor of an unsupported variant, so that `name_of` raises an error. drafter: whether the model has a drafter."""
    if not name.startswith("mtp.") or _variant(name) is not None:
        return False
    return not drafter or not name.startswith("mtp.0.") or name.startswith(COPIES)


def _variant(name: str) -> str | None:
    return next((variant for pattern, variant in VARIANTS if re.search(pattern, name)), None)
