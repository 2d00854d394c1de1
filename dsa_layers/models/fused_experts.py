"""Checkpoints that hold all experts of a layer in one tensor, as transformers' module names have them."""

import re

from dsa_layers.checkpoint import CheckpointError, Index

_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<scale>_scale_inv)?")


def split_experts(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    """The tensors that a checkpoint tensor holds, each with its slice; () is all of it.

    `experts.gate_up_proj` [E, 2 I, H] holds `experts.e.gate_proj.weight` and below it `up_proj`, `experts.down_proj`
    [E, H, I] `experts.e.down_proj.weight`; those with `_scale_inv` their scales, whatever block one is for. Any other
    tensor is itself. Raises CheckpointError for a shape that cannot be that.
    """
    match = _FUSED.fullmatch(name)
    if match is None:
        return {name: ()}
    experts, projection = match["experts"], match["projection"]
    kind = "weight" + (match["scale"] or "")
    if len(shape) != 3 or (projection == "gate_up_proj" and shape[1] % 2):
        accepted = "[experts, 2 * inner, hidden]" if projection == "gate_up_proj" else "[experts, hidden, inner]"
        raise CheckpointError(f"has shape {list(shape)}; experts in one tensor are {accepted}")
    if projection == "down_proj":
        return {f"{experts}.{e}.down_proj.{kind}": (e,) for e in range(shape[0])}
    inner = shape[1] // 2
    halves = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
    return {f"{experts}.{e}.{half}.{kind}": (e, rows) for e in range(shape[0]) for half, rows in halves.items()}
