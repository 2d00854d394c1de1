"""Queries for absorbed MLA: multiply the queries by W_UK, which is FP8, and rotate the rope channels."""

import torch

from dsa.kernels.mla.limits import ABSORBED_NOPE, HEAD_DIM, HEAD_DIM_V, MAX_UP_PROJECTION_ROWS, UP_PROJECTION_ROWS
from dsa.ops.gemm._operands import pair
from dsa.reference.mla import mla_absorb_queries as reference
from dsa.runtime.declare import (
    ALIGNED,
    E4M3,
    F32,
    FLOATS,
    INNER,
    ROWS,
    Arguments,
    Tensor,
    at_most,
    op,
    rows_at_16_bytes,
)

__all__ = ["mla_absorb_queries"]

KV_B = {
    "weight": Tensor("N L", E4M3, layout=ALIGNED, name="kv_b[0]"),
    "weight_scale": Tensor("ceil(N/128) ceil(L/128)", F32, layout=INNER, name="kv_b[1]"),
}
KV_B_LIMITS = {"L": (HEAD_DIM_V,), "N": at_most(MAX_UP_PROJECTION_ROWS)}


def check_heads(weight: torch.Tensor, heads: int, least: int, named: str) -> None:
    """Raise ValueError unless `weight` has the same number of rows, at least `least`, for each of the `heads` heads.

    named: the argument that has these heads, for messages
    """
    rows = len(weight)
    if rows % heads if heads else rows:
        raise ValueError(f"kv_b[0]: rows must be a multiple of the {heads} heads of {named}, got {rows}")
    if heads and rows // heads < least:
        raise ValueError(f"kv_b[0]: must have at least {least} rows a head, got {rows} for {heads} heads")


def _check(q_nope: torch.Tensor, q_pe: torch.Tensor, cos: torch.Tensor, weight: torch.Tensor) -> None:
    if q_pe.shape[2] != 2 * cos.shape[1]:
        raise ValueError(f"q_pe: must have twice as many channels as cos, {2 * cos.shape[1]}, got {q_pe.shape[2]}")
    check_heads(weight, *q_nope.shape[1:], "q_nope")


MLA_ABSORB_QUERIES = Arguments(
    rule=_check,
    q_nope=Tensor("T H nope", FLOATS, layout=ROWS),
    q_pe=Tensor("T H R", FLOATS, like="q_nope", layout=ROWS),
    cos=Tensor("T R/2", F32, layout=INNER),
    sin=Tensor("T R/2", F32, layout=INNER),
    **KV_B,
)


def mla_absorb_queries(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_b: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """q[t, h] = [sum_d q_nope[t, h, d] W_UK[h][d] | rope(q_pe[t, h])]: the queries of the latents and of the rope keys.

    W_UK[h] consists of the first rows of head h in kv_b, as many as q_nope has channels; the rows of W_UV[h] follow. A
    weight is e4m3 * scale, rounded to q_nope's dtype, as `dequantize_per_block` returns it. Products are summed in
    fp32, and the sum is rounded once. Rope rotates pairs of adjacent channels (2i, 2i + 1), with the same bits as
    `apply_rotary(interleaved=True)`.

    q_nope    [T, H, nope] bf16 (fp16 or fp32 in the reference), for example a slice of q's channels
    q_pe      [T, H, R] of q_nope's dtype
    cos, sin  [T, R / 2] fp32
    kv_b      (w [H * N, L] e4m3, ws [ceil(H * N / 128), ceil(L / 128)] fp32), N at least nope: the weight of MLA's kv_b
              and its scales. The index of a head's first row need not be a multiple of 128

    Returns q [T, H, L + R] in q_nope's dtype, contiguous. Not differentiable. Without tokens or heads it is empty.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel for bf16, nope of 128 or 192, L = 512, R = 64, N a multiple of 32; other dtypes run the
    PyTorch reference, with a warning. Meant for few tokens, where loading the weights takes most of the time; slow for
    many tokens. Deterministic, and a token's result does not depend on the other tokens. CUDA-graph safe, no host
    synchronisation.
    Source: `MLA` of DeepSeek-V3.2's inference code, decoding: `einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :nope])`.
    """
    return _mla_absorb_queries(q_nope, q_pe, cos, sin, *pair("kv_b", kv_b))


def _results(q_nope: torch.Tensor, q_pe: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return q_nope.new_empty((*q_nope.shape[:2], weight.shape[1] + q_pe.shape[2]))


def check_head_rows(weight: torch.Tensor, heads: int) -> None:
    if heads and len(weight) // heads % UP_PROJECTION_ROWS:
        raise ValueError(
            f"kv_b[0]: the kernel takes a multiple of {UP_PROJECTION_ROWS} rows a head, got {len(weight)} for {heads} "
            "heads"
        )


@op(
    arguments=MLA_ABSORB_QUERIES,
    reference=reference.mla_absorb_queries,
    results=_results,
    limits=KV_B_LIMITS | {"nope": ABSORBED_NOPE, "R": (HEAD_DIM - HEAD_DIM_V,)},
    rule=lambda q_nope, weight: check_head_rows(weight, q_nope.shape[1]),
    dtypes=(torch.bfloat16,),
)
def _mla_absorb_queries(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    from dsa.kernels.mla.mla_absorb_queries_sm90 import compile_mla_absorb_queries

    q = _results(q_nope, q_pe, weight)
    if q.numel():
        launch = compile_mla_absorb_queries(q_nope.shape[2])
        launch(rows_at_16_bytes(q_nope), rows_at_16_bytes(q_pe), cos, sin, weight, weight_scale, q)
    return q
