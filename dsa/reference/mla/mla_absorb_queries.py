"""Queries of the latents: MLA's W_UK, in FP8, absorbed into the queries, and their rope channels turned."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp8_cast import dequantize_per_block
from dsa.reference.gemm.fp8_gemm_nt import pair
from dsa.runtime.arguments import ALIGNED, F32, INNER, ROWS, Arguments, Tensor
from dsa.runtime.checks import E4M3, FLOATS, check_memory

KV_B = {
    "weight": Tensor("N L", E4M3, layout=ALIGNED, name="kv_b[0]"),
    "weight_scale": Tensor("ceil(N/128) ceil(L/128)", F32, layout=INNER, name="kv_b[1]"),
}


def check_heads(weight: torch.Tensor, heads: int, least: int, named: str) -> None:
    """The rows of kv_b belong to the so many heads of the argument that is named, each of which has as many, at least
    so many."""
    rows = len(weight)
    if rows % heads if heads else rows:
        raise ValueError(f"kv_b[0]: rows must be a multiple of the {heads} heads of {named}, got {rows}")
    if heads and rows // heads < least:
        raise ValueError(f"kv_b[0]: must have at least {least} rows a head, got {rows} for {heads} heads")


def by_head(
    weight: torch.Tensor, weight_scale: torch.Tensor, heads: int, dtype: torch.dtype, least: int
) -> torch.Tensor:
    """kv_b [H, N, L] in `dtype`, contiguous, so that sums do not depend on how weights lie. least: N where there are no
    heads."""
    rows = len(weight) // heads if heads else least
    return dequantize_per_block(weight.contiguous(), weight_scale, dtype).view(heads, rows, weight.shape[1])


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


@without_autocast
@torch.no_grad()
def mla_absorb_queries(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_b: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """q[t, h] = [sum_d q_nope[t, h, d] W_UK[h][d] | rope(q_pe[t, h])].

    W_UK is dequantised to q_nope's dtype, products are summed in fp32. Arguments as of `dsa.mla_absorb_queries`.
    """
    weight, weight_scale = pair("kv_b", kv_b)
    MLA_ABSORB_QUERIES.check(q_nope, q_pe, cos, sin, weight, weight_scale)
    check_memory("q_nope", q_nope)
    heads, nope = q_nope.shape[1:]
    w_uk = by_head(weight, weight_scale, heads, q_nope.dtype, nope)[:, :nope]
    absorbed = torch.einsum("thd,hdc->thc", q_nope.float(), w_uk.float()).to(q_nope.dtype)
    return torch.cat((absorbed, apply_rotary(q_pe, cos, sin, interleaved=True)), -1)
