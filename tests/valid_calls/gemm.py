"""Calls of casts and products."""

from functools import partial

import torch

import dsa
from tests.valid_calls.description import BF16, E4M3, F32, Maker, ValidCall, call

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


def cast(name):
    """e4m3 like the argument, and a scale for each group of channels."""

    def promise(a):
        *leading, channels = a[name].shape
        return [((*leading, channels), E4M3), ((*leading, -(-channels // a.get("gran_k", 128))), F32)]

    return promise


@valid("per_token_cast_to_fp8", cast("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 256), "use_ue8m0": False, "gran_k": 128, "hadamard": True}


def scattered(a):
    rows, channels = a["places"].numel(), a["x"].shape[1]
    return [((rows, channels), E4M3), ((rows, channels // 128), F32)]


@valid("scatter_cast_to_fp8", scattered)
def _(new: Maker):
    return {"x": new.bf16(3, 256), "places": new.ints([[0, 5], [3, 1], [4, 2]]), "use_ue8m0": False}


def grouped_rows(a):
    (tokens, heads, channels), groups = a["x"].shape, a["groups"]
    columns = heads * channels // groups
    return [((tokens * groups, columns), E4M3), ((tokens * groups, columns // 128), F32)]


@valid("rotary_cast_to_fp8", grouped_rows)
def _(new: Maker):
    return {"x": new.bf16(3, 4, 128), **new.angles(3), "groups": 2, "use_ue8m0": False}


@valid("swiglu_cast_to_fp8", cast("gate"))
def _(new: Maker):
    return {"gate": new.bf16(3, 200), "up": new.bf16(3, 200), "use_ue8m0": True, "limit": 2.0}


@valid("per_block_cast_to_fp8", lambda a: [_block(a["w"].shape, E4M3), _scales(a["w"].shape, a["block"])])
def _(new: Maker):
    return {"w": new.f32(150, 140), "use_ue8m0": False, "block": 128}


@valid("dequantize_per_block", lambda a: [_block(a["q"].shape, a["dtype"])])
def _(new: Maker):
    return {"q": new.e4m3(150, 140), "scale": new.positive(2, 2), "dtype": BF16, "block": 128}


def _block(shape, dtype):
    return tuple(shape), dtype


def _scales(shape, block):
    return tuple(-(-n // block) for n in shape), F32


@valid("fp8_gemm_nt", lambda a: [((*a["a"][0].shape[:-1], len(a["b"][0])), a["out_dtype"])])
def _(new: Maker):
    a, b = (new.e4m3(3, 160), new.positive(3, 2)), (new.e4m3(136, 160), new.positive(2, 2))
    return {"a": a, "b": b, "out_dtype": F32}


def rows(a):
    """How many rows a product has: those that are gathered, or all."""
    return len(a["a"][0] if a["rows"] is None else a["rows"])


def products(a):
    return [((rows(a), a["b"][0].shape[1]), a["out_dtype"])]


def activations(a):
    inner = a["b"][0].shape[1] // 2
    return [((rows(a), inner), E4M3), ((rows(a), inner // 128), F32)]


def fp4(new: Maker, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., N, K]: any codes, and scales that e4m3 holds."""
    *rows, channels = shape
    packed = new.e4m3(*rows, channels // 2).view(torch.uint8)
    exponents = new.positive(*rows, channels // 32).clamp(max=4.0).round()
    return packed, exponents.exp2().to(torch.float8_e8m0fnu)


@valid("grouped_fp8_gemm_nt", products)
def _(new: Maker):
    a, b = (new.e4m3(5, 160), new.positive(5, 2)), (new.e4m3(3, 16, 160), new.positive(3, 1, 2))
    rows = {"ends": new.ints([2, 2, 4]), "rows": new.ints([4, 0, 0, 2]), "weights": new.positive(4), "expected_rows": 3}
    return {"a": a, "b": b, "out_dtype": BF16, **rows}


@valid("grouped_fp8_fp4_gemm_nt", products)
def _(new: Maker):
    a, weight = (new.e4m3(5, 160), new.positive(5, 2)), fp4(new, 3, 16, 160)
    rows = {"ends": new.ints([2, 2, 4]), "rows": new.ints([4, 0, 0, 2]), "weights": new.positive(4), "expected_rows": 3}
    return {"a": a, "b": (*weight, dsa.fp4_block_scales(*weight)), "out_dtype": BF16, **rows}


@valid("grouped_fp8_gemm_swiglu", activations)
def _(new: Maker):
    a, b = (new.e4m3(5, 160), new.positive(5, 2)), (new.e4m3(3, 256, 160), new.positive(3, 2, 2))
    options = {"limit": 2.0, "use_ue8m0": False, "dtype": BF16, "expected_rows": 3}
    return {"a": a, "b": b, "ends": new.ints([2, 2, 4]), "rows": new.ints([4, 0, 0, 2]), **options}


@valid("grouped_fp8_fp4_gemm_swiglu", activations)
def _(new: Maker):
    a, weight = (new.e4m3(5, 160), new.positive(5, 2)), fp4(new, 3, 256, 160)
    options = {"limit": 2.0, "use_ue8m0": False, "dtype": BF16, "expected_rows": 3}
    b = *weight, dsa.fp4_block_scales(*weight)
    return {"a": a, "b": b, "ends": new.ints([2, 2, 4]), "rows": new.ints([4, 0, 0, 2]), **options}


def blocks(a):
    *leading, rows, half = a["packed"].shape
    return (*leading, -(-rows // 128), -(-half // 64)), F32


@valid("fp4_block_scales", lambda a: [blocks(a)])
def _(new: Maker):
    packed, scale = fp4(new, 2, 140, 160)
    return {"packed": packed, "scale": scale}


@valid("widen_fp4", lambda a: [((*a["packed"].shape[:-1], 2 * a["packed"].shape[-1]), E4M3), blocks(a)])
def _(new: Maker):
    packed, scale = fp4(new, 2, 140, 160)
    return {"packed": packed, "scale": scale}


@valid("linear_fp32", lambda a: [((len(a["x"]), len(a["weight"])), F32)])
def _(new: Maker):
    return {"x": new.bf16(3, 64), "weight": new.bf16(40, 64), "scale": 0.5, "scaled_from": 24}
