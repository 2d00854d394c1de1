"""Calls of norm, rotation and hyper connections."""

from functools import partial

from tests.valid_calls.description import E4M3, F32, Maker, ValidCall, call, like

CALLS: list[ValidCall] = []


valid = partial(call, CALLS)


@valid("rms_norm", like("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 2, 16), "weight": new.f32(16), "eps": 1e-6}


@valid("rms_norm_rotary", like("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 2, 80), "weight": new.f32(80), **new.angles(3), "eps": 1e-6}


def cast(a):
    tokens, channels = a["x"].shape
    return [((tokens, channels), a["x"].dtype), ((tokens, channels), E4M3), ((tokens, channels // 128), F32)]


@valid("rms_norm_cast_to_fp8", cast)
def _(new: Maker):
    return {"x": new.bf16(3, 256), "weight": new.f32(256), "eps": 1e-6, "use_ue8m0": True}


@valid("add_rms_norm_cast_to_fp8", lambda a: [*like("x")(a), *cast(a)])
def _(new: Maker):
    x, residual = new.bf16(3, 256), new.bf16(3, 256)
    return {"x": x, "residual": residual, "weight": new.f32(256), "eps": 1e-6, "use_ue8m0": False}


@valid("apply_rotary", like("x"))
def _(new: Maker):
    return {"x": new.bf16(3, 2, 80), **new.angles(3), "interleaved": True, "dims": "first", "out": None}


@valid("apply_rotary into out", like("x"), written=("out",))
def _(new: Maker):
    return {"x": new.bf16(3, 80), **new.angles(3), "interleaved": False, "dims": "last", "out": new.bf16(3, 80)}


@valid(
    "hyper_collapse",
    lambda a: [
        (tuple(a["streams"][:, 0].shape), a["streams"].dtype),
        (tuple(a["streams"].shape[:2]), F32),
        ((*a["streams"].shape[:2], a["streams"].shape[1]), F32),
    ],
)
def _(new: Maker):
    tensors = {"streams": new.bf16(3, 4, 16), "mix": new.f32(3, 24), "base": new.f32(24), "scale": new.f32(3)}
    return {**tensors, "iterations": 3, "eps": 1e-6, "hc_eps": 1e-6}


@valid("hyper_expand", like("streams"))
def _(new: Maker):
    return {"y": new.bf16(3, 16), "streams": new.bf16(3, 4, 16), "post": new.f32(3, 4), "comb": new.f32(3, 4, 4)}


@valid("hyper_mix", lambda a: [((a["streams"].shape[0], a["parts"].shape[1]), F32)])
def _(new: Maker):
    return {"streams": new.bf16(3, 4, 16), "parts": new.bf16(3, 24, 64)}


@valid(
    "hyper_collapse_norm_cast_to_fp8",
    lambda a: [
        *cast({"x": a["streams"][:, 0]}),
        (tuple(a["streams"].shape[:2]), F32),
        ((*a["streams"].shape[:2], a["streams"].shape[1]), F32),
    ],
)
def _(new: Maker):
    tensors = {"streams": new.bf16(3, 4, 256), "mix": new.f32(3, 24), "base": new.f32(24), "scale": new.f32(3)}
    options = {"iterations": 3, "eps": 1e-6, "hc_eps": 1e-6, "norm_eps": 1e-6, "use_ue8m0": True}
    return {**tensors, "weight": new.f32(256), **options}


@valid("hyper_expand_mix", lambda a: [*like("streams")(a), ((a["streams"].shape[0], a["parts"].shape[1]), F32)])
def _(new: Maker):
    tensors = {"y": new.bf16(3, 16), "streams": new.bf16(3, 4, 16), "post": new.f32(3, 4), "comb": new.f32(3, 4, 4)}
    return {**tensors, "parts": new.bf16(3, 24, 64)}


@valid("hyper_head", lambda a: [(tuple(a["streams"][:, 0].shape), a["streams"].dtype)])
def _(new: Maker):
    tensors = {"streams": new.bf16(3, 4, 16), "mix": new.f32(3, 4), "base": new.f32(4), "scale": new.f32(1)}
    return {**tensors, "eps": 1e-6, "hc_eps": 1e-6}
