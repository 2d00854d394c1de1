"""Cases of mla_absorb_queries and mla_values_cast_to_fp8, the products with kv_b before and after MLA attention."""

import torch

import dsa
from dsa.cases.attention import D_V
from dsa.cases.case import BF16, Case, Given, Maker, Results
from dsa.cases.elementwise import rotated
from dsa.cases.mla import HALF_ULP, check_scales, check_unbiased, sized


def small_kv_b(new: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    return new.e4m3(512, 512), new.positive(4, 4)


def kv_b(new: Maker, heads: int, rows: int, latent: int = D_V) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 weights [heads * rows, latent] with fp32 scales per 128 x 128 block. Blocks differ in magnitude, and
    the scales are not powers of two."""
    weight = new.f32(heads * rows, latent) * latent**-0.5
    weight *= torch.logspace(-2, 1, heads * rows, device=new.device)[:, None]
    return dsa.per_block_cast_to_fp8(weight, use_ue8m0=False)


def dequantised(pair: tuple[torch.Tensor, torch.Tensor], heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight as float64 [heads, rows, L], rounded to `dtype` like the kernels' operands."""
    weight, scale = pair
    rows, columns = (torch.arange(n, device=weight.device) // 128 for n in weight.shape)
    return (weight.float() * scale[rows[:, None], columns]).to(dtype).double().unflatten(0, (heads, -1))


def product(equation: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the product in float64, an error bound for a sum in fp32 that is rounded to x's dtype)."""
    expected = torch.einsum(equation, x.double(), w)
    size = torch.einsum(equation, x.double().abs(), w.abs())
    return expected, expected.abs() * HALF_ULP[x.dtype] + size * 2**-18


def small_absorb(new: Maker) -> Given:
    return {"q_nope": new.bf16(3, 2, 128), "q_pe": new.bf16(3, 2, 64), **new.angles(3), "kv_b": small_kv_b(new)}


def absorb(
    new: Maker,
    tokens: int = 9,
    heads: int = 5,
    nope: int = 128,
    rows: int = 160,
    latent: int = D_V,
    dtype: torch.dtype = BF16,
) -> Given:
    q = new.f32(tokens, heads, nope + 64).to(dtype)
    parts = {"q_nope": q[..., :nope], "q_pe": q[..., nope:], **new.angles(tokens)}
    return {**parts, "kv_b": kv_b(new, heads, rows, latent)}


def check_absorb(a: Given, found: Results) -> float:
    q_nope, q_pe = a["q_nope"], a["q_pe"]
    w_uk = dequantised(a["kv_b"], q_nope.shape[1], q_nope.dtype)[:, : q_nope.shape[2]]
    expected, bound = product("thd,hdc->thc", q_nope, w_uk)
    turned = rotated(q_pe, a["cos"], a["sin"])
    bound = torch.cat((bound, turned.abs() * HALF_ULP[q_pe.dtype] + q_pe.abs().amax(2, keepdim=True) * 2**-21), 2)
    error = (found[0].double() - torch.cat((expected, turned), 2)).abs()
    if not (error <= bound).all():
        raise AssertionError(f"q: off by up to {(error / bound).max():.3g} times rounding")
    return error.max().item() if error.numel() else 0.0


def small_values(new: Maker) -> Given:
    return {"attended": new.bf16(3, 2, 512), "kv_b": small_kv_b(new), "v_dim": 128, "use_ue8m0": False}


def values(
    new: Maker,
    tokens: int = 9,
    heads: int = 5,
    v_dim: int = 128,
    rows: int = 160,
    latent: int = D_V,
    use_ue8m0: bool = False,
    dtype: torch.dtype = BF16,
) -> Given:
    sizes = torch.logspace(-4, 3, heads, device=new.device)[:, None]
    attended = (new.f32(tokens, heads, latent) * sizes).to(dtype)
    return {"attended": attended, "kv_b": kv_b(new, heads, rows, latent), "v_dim": v_dim, "use_ue8m0": use_ue8m0}


def check_values(a: Given, found: Results) -> float:
    """Compare with float64. The tolerance is the product's rounding error plus half an e4m3 step."""
    attended, (q, scale) = a["attended"], found
    w_uv = dequantised(a["kv_b"], attended.shape[1], attended.dtype)[:, -a["v_dim"] :]
    expected, bound = (x.flatten(1).unflatten(1, (-1, 128)) for x in product("thc,hvc->thv", attended, w_uv))
    largest, off = expected.abs().amax(-1), bound.amax(-1)
    check_scales(scale, largest - off, largest + off, a["use_ue8m0"])
    step = scale.double()[..., None]
    error = (q.double().view(expected.shape) * step - expected).abs()
    if not (error <= bound * 1.07 + expected.abs() / 16 + step * 2**-10).all():
        raise AssertionError("values: off by more than rounding")
    check_unbiased("values", q.double().view(expected.shape) * step, expected)
    return error.max().item() if error.numel() else 0.0


CASES = [
    Case("mla_absorb_queries", sized(small_absorb, absorb), check_absorb, {"tokens": 9}),
    Case("mla_values_cast_to_fp8", sized(small_values, values), check_values, {"tokens": 9}),
]
