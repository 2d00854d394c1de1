"""Names of DeepSeek-V4's tensors: in published checkpoints, in those that transformers writes, and in the model."""

import re

from dsa_layers.errors import CheckpointError

# Names in a checkpoint -> in the model: substitutions in this order.
RENAMES = [
    # The names of transformers' modules -> the published ones. Its save_pretrained writes a mixture of both by default.
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
    # The published names -> the model's.
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

# The model's names -> the published ones.
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

# What the multi-token-prediction layer shares with the model, of which some checkpoints have copies.
COPIES = ("mtp.0.emb.", "mtp.0.embed.", "mtp.0.head.")

# Tensors by which a checkpoint is known to be of a variant that is not this model.
VARIANTS = [
    (r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\.", "the DSpark drafter"),
    (r"\.engram\.|\.attn\.indexer\.(wk|k_norm)\.", "DeepSeek-V4.1"),
]


def name_of(stored: str) -> str:
    """The model's name of a checkpoint's tensor. Raises CheckpointError for a tensor of a variant of the model that is
    not supported."""
    variant = _variant(stored)
    if variant is not None:
        raise CheckpointError(f"belongs to {variant}, which is not supported")
    for pattern, name in RENAMES:
        stored = re.sub(pattern, name, stored)
    return stored


def stored_name(name: str, mtp_layer: int = 0) -> str:
    """The published name of a tensor of the model: the inverse of `name_of`. mtp_layer: the multi-token-prediction
    layer that the drafter's tensors are in."""
    for pattern, stored in PUBLISHED_NAMES:
        name = re.sub(pattern, stored, name)
    return re.sub(r"^mtp\.0\.", f"mtp.{mtp_layer}.", name)


def skips(name: str, *, drafter: bool) -> bool:
    """Whether a checkpoint tensor belongs to a multi-token-prediction layer and no drafter reads it. drafter: whether
    the model has one."""
    if not name.startswith("mtp.") or _variant(name) is not None:
        return False
    return not drafter or not name.startswith("mtp.0.") or name.startswith(COPIES)


def _variant(name: str) -> str | None:
    return next((variant for pattern, variant in VARIANTS if re.search(pattern, name)), None)
