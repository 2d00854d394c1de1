"""Names of multi-token-prediction layers' tensors: in checkpoints, and in a model with a drafter."""

import re

from dsa_layers.families.sparse_mla.config import SparseMLAConfig

# Of what the layer shares with the model: a checkpoint has copies of it, or none.
_COPIES = {"embed_tokens.": "model.embed_tokens.", "shared_head.head.": "lm_head."}
_BESIDE_BLOCK = re.compile(r"(enorm|hnorm|eh_proj)\.")


def mtp_part(config: SparseMLAConfig, stored: str) -> tuple[int, str] | None:
    """(which of the multi-token-prediction layers, the name in it) of a checkpoint's tensor; None for others."""
    for i in range(config.num_nextn_predict_layers):
        prefix = f"model.layers.{config.num_hidden_layers + i}."
        if stored.startswith(prefix):
            return i, stored.removeprefix(prefix)
    return None


def is_read(layer: int, name: str) -> bool:
    """Whether a drafter reads this tensor: one of the first layer, and no copy."""
    return layer == 0 and not name.startswith(tuple(_COPIES))


def drafter_name(name: str) -> str:
    """The model's name of a tensor of the first multi-token-prediction layer."""
    for copy, original in _COPIES.items():
        if name.startswith(copy):
            return original + name.removeprefix(copy)
    if name.startswith("shared_head.norm."):
        return "drafter." + name.removeprefix("shared_head.")
    return f"drafter.{name}" if _BESIDE_BLOCK.match(name) else f"drafter.block.{name}"


def stored_name(config: SparseMLAConfig, name: str, mtp_layer: int) -> str:
    """The checkpoint's name of a tensor of the model. For a tensor of the drafter, the name in the
    multi-token-prediction layer `mtp_layer`."""
    if not name.startswith("drafter."):
        return name
    name = re.sub(r"^drafter\.(block\.)?", "", name)
    if name.startswith("norm."):
        name = f"shared_head.{name}"
    return f"model.layers.{config.num_hidden_layers + mtp_layer}.{name}"
