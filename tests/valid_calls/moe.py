"""Calls of the gate, the order and the sum of experts."""

from functools import partial

import torch

from tests.valid_calls.description import F32, INT32, Maker, ValidCall, call

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


@valid("moe_gate", lambda a: [((len(a["logits"]), a["top_k"]), x) for x in (torch.int64, F32)])
def _(new: Maker):
    groups = {"n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}
    return {"logits": new.f32(3, 16), "bias": new.f32(16), "top_k": 3, "scores": "sigmoid", **groups}


@valid(
    "sort_by_expert",
    lambda a: [((a["experts"].numel(),), INT32), (tuple(a["experts"].shape), INT32), ((a["count"],), INT32)],
)
def _(new: Maker):
    return {"experts": new.ints([[2, 0], [7, 2], [0, -1]]), "count": 4}


@valid("combine_experts", lambda a: [((len(a["rows"]), a["y"].shape[1]), a["y"].dtype)])
def _(new: Maker):
    rows = new.ints([[0, 3], [5, -1], [2, 2]])
    added = {"shared": new.bf16(3, 16), "residual": new.bf16(3, 16)}
    return {"y": new.bf16(6, 16), "rows": rows, "weights": new.f32(3, 2), **added}


def _routed(tokens, top_k, count):
    """Experts and weights, and the order of entries, their rows and the experts' ends."""
    chosen = tokens, top_k
    return [(chosen, torch.int64), (chosen, F32), ((tokens * top_k,), INT32), (chosen, INT32), ((count,), INT32)]


@valid("route_to_experts", lambda a: _routed(len(a["x"]), a["top_k"], a["count"]))
def _(new: Maker):
    groups = {"n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}
    router = {"x": new.bf16(3, 64), "weight": new.bf16(16, 64), "bias": new.f32(16), "top_k": 3}
    return {**router, "scores": "sigmoid", **groups, "first_expert": 4, "count": 8}


@valid("route_by_table", lambda a: _routed(len(a["x"]), a["table"].shape[1], a["count"]))
def _(new: Maker):
    router = {"x": new.bf16(3, 64), "weight": new.bf16(16, 64)}
    table = new.ints([[0, 5, 2], [15, 1, 8]]).long()
    return {**router, "table": table, "tokens": new.ints([1, 0, 1]).long(), "scale": 2.5, "first_expert": 4, "count": 8}
