"""Calls of casts and products."""

from functools import partial

import torch

from tests.valid_calls.description import BF16, F32, Maker, ValidCall, call

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


E4M3 = torch.float8_e4m3fn


def cast(name):
    """e4m3 like the argument, and a scale for each group of channels."""

    def promise(a):
        *leading, channels = a[name].shape
        return [((*leading, channels), E4M3), ((*leading, -(-channels // a.get("gran_k", 128))), F32)]

    return promise


@valid("per_token_cast_to_fp8", cast("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 256), "use_ue8m0": False, "gran_k": 128, "hadamard": True}


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


@valid("grouped_fp8_gemm_nt", lambda a: [((len(a["a"][0]), a["b"][0].shape[1]), a["out_dtype"])])
def _(new: Maker):
    a, b = (new.e4m3(5, 160), new.positive(5, 2)), (new.e4m3(3, 16, 160), new.positive(3, 1, 2))
    return {"a": a, "b": b, "ends": new.ints([2, 2, 5]), "out_dtype": BF16}
