"""Tensors that hold all experts of a layer: those of models, and of checkpoints that transformers writes."""

import re

from dsa_layers.config.fields import MAX_EXPERTS
from dsa_layers.errors import CheckpointError

# A part of a tensor: an index or a slice per leading dimension. () is the whole tensor.
Index = tuple[int | slice, ...]

_FUSED = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<scale>_scale_inv|_block_scale)?"
)


def split_experts(name: str, shape: tuple[int, ...], experts: int | None = None) -> dict[str, Index]:
    """The tensors that the tensor `name` consists of, each with its slice; () is all of it.

    `experts.gate_up_proj` [E, 2 I, H] holds `experts.e.gate_proj.weight` above `experts.e.up_proj.weight`.
    `experts.down_proj` [E, H, I] holds `experts.e.down_proj.weight`. Tensors with `_scale_inv` hold the scales, for
    blocks of any size. Tensors with `_block_scale` hold what a model has in addition to FP4 weights. Any other tensor
    consists of itself.
    experts: the required E, where it is known. Raises CheckpointError for another shape, before anything is allocated:
    a header of a few bytes can claim 10^9 experts.
    """
    match = _FUSED.fullmatch(name)
    if match is None:
        return {name: ()}
    prefix, projection = match["experts"], match["projection"]
    kind = "weight" + (match["scale"] or "")
    if len(shape) != 3 or 0 in shape or (projection == "gate_up_proj" and shape[1] % 2):
        accepted = "[experts, 2 * inner, hidden]" if projection == "gate_up_proj" else "[experts, hidden, inner]"
        raise CheckpointError(f"has shape {list(shape)}; experts in one tensor are {accepted}")
    if shape[0] > MAX_EXPERTS or (experts is not None and shape[0] != experts):
        accepted = f"at most {MAX_EXPERTS} are accepted" if experts is None else f"the model has {experts}"
        raise CheckpointError(f"has shape {list(shape)}, that is {shape[0]} experts; {accepted}")
    if projection == "down_proj":
        return {f"{prefix}.{e}.down_proj.{kind}": (e,) for e in range(shape[0])}
    inner = shape[1] // 2
    halves = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
    return {f"{prefix}.{e}.{half}.{kind}": (e, rows) for e in range(shape[0]) for half, rows in halves.items()}


def sliced(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """The shape of the slice `index` of a tensor."""
    kept = (len(range(*place.indices(n))) for n, place in zip(shape, index) if isinstance(place, slice))
    return (*kept, *shape[len(index) :])
