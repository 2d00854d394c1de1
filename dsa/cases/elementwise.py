"""Cases of norms, rotary embedding and hyper connections."""

import math
from collections.abc import Callable
from functools import partial

import torch

import dsa
from dsa.cases.case import BF16, F32, Case, Given, Maker, Results
from dsa.testing import assert_close

# Relative tolerance of a result that is rounded once. For 16-bit dtypes: half a unit in the last place. For fp32: the
# error of sums and of the inverse square root.
ROUNDING = {torch.bfloat16: 1.01 / 256, torch.float16: 1.01 / 2048, torch.float32: 2e-6}
# Relative tolerance of results that are sums in fp32, rounded once: a unit in the last place, because an error of the
# sum can move the result to the adjacent number. For fp32: the error of the sums. COSINE has the tolerances of
# `calc_diff` for the same results.
NEIGHBOUR = {torch.bfloat16: 2.01 / 256, torch.float16: 2.01 / 2048, torch.float32: 2e-5}
COSINE = {torch.bfloat16: 1e-5, torch.float16: 1e-6, torch.float32: 1e-9}


def equal(names: str, found: Results, expected: Results) -> None:
    """Require equal numbers; any NaN equals any other NaN, and -0.0 equals 0.0."""
    for name, got, right in zip(names.split(), found, expected, strict=True):
        if (got.dtype, got.shape) != (right.dtype, right.shape):
            raise AssertionError(f"{name}: expected {right.dtype} {[*right.shape]}, got {got.dtype} {[*got.shape]}")
        ours, theirs = got.float(), right.float()
        wrong = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        if wrong.any():
            raise AssertionError(f"{name}: {int(wrong.sum())} of {wrong.numel()} numbers differ")


def within(name: str, got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> float:
    """Return the largest error. Raise AssertionError if an error exceeds `allowed` where `expected` is finite."""
    error = (got.double() - expected).abs()
    if (~(error <= allowed) & expected.isfinite()).any():
        raise AssertionError(f"{name}: off by up to {(error / allowed).nan_to_num(0.0).max():.3g} of what is allowed")
    return error.nan_to_num(0.0).max().item() if error.numel() else 0.0


def every_size(new: Maker, count: int) -> torch.Tensor:
    return torch.logspace(-3, 3, count, dtype=F32, device=new.device)


def rows_of_every_size(new: Maker, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (new.f32(*shape) * every_size(new, math.prod(shape[:-1])).view(*shape[:-1], 1)).to(dtype)


# rms_norm, rms_norm_rotary, rms_norm_cast_to_fp8, add_rms_norm_cast_to_fp8


def norm(
    new: Maker,
    shape: tuple[int, ...] = (3, 2, 16),
    dtype: torch.dtype = BF16,
    weighted: bool = True,
    eps: float = 1e-6,
) -> Given:
    x = rows_of_every_size(new, *shape, dtype=dtype)
    return {"x": x, "weight": new.f32(shape[-1]) if weighted else None, "eps": eps}


def rms_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def check_norm(a: Given, found: Results) -> float:
    expected = rms_normed(a["x"], a["weight"], a["eps"])
    # abs_tol is the spacing of subnormal fp16 numbers.
    return assert_close("y", found[0], expected, abs_tol=6e-8, rel_tol=ROUNDING[found[0].dtype], cos_tol=5e-6)


def norm_of_heads(
    new: Maker,
    tokens: int = 3,
    heads: int = 2,
    channels: int = 80,
    rotated: int = 64,
    dtype: torch.dtype = BF16,
    weighted: bool = True,
) -> Given:
    normed = norm(new, (tokens, heads, channels), dtype, weighted)
    return {"x": normed["x"], "weight": normed["weight"], **new.angles(tokens, rotated), "eps": 1e-6}


def check_norm_of_heads(a: Given, found: Results) -> float:
    """Require the same bits as `rms_norm` followed by `apply_rotary`, and compare with float64. The tolerance, relative
    to the head's largest channel, covers two roundings: after the norm and after the rotation."""
    normed = dsa.rms_norm(a["x"], a["weight"], a["eps"])
    equal("y", found, [dsa.apply_rotary(normed, a["cos"], a["sin"], interleaved=True, dims="last")])
    expected = rotated(rms_normed(a["x"], a["weight"], a["eps"]), a["cos"], a["sin"])
    return within("y", found[0], expected, 4 * ROUNDING[normed.dtype] * expected.abs().amax(-1, keepdim=True))


def norm_with_cast(
    new: Maker,
    tokens: int = 3,
    channels: int = 256,
    dtype: torch.dtype = BF16,
    eps: float = 1e-6,
    use_ue8m0: bool = True,
    added: bool = False,
) -> Given:
    x, residual = (rows_of_every_size(new, tokens, channels, dtype=dtype) for _ in range(2))
    tensors = {"x": x, "residual": residual} if added else {"x": x}
    return {**tensors, "weight": new.f32(channels), "eps": eps, "use_ue8m0": use_ue8m0}


def check_norm_with_cast(a: Given, found: Results) -> float:
    """Require the bits of other ops, and compare y with float64.

    total, if it is returned, must have the bits of residual + x in PyTorch. q and scale must have the bits of the cast
    of y. With more than 128 channels y must have the bits of `rms_norm`.
    """
    *total, y, q, scale = found
    normed = {"x": a["x"], "weight": a["weight"], "eps": a["eps"]}
    if total:
        normed["x"] = a["residual"] + a["x"]
        equal("total", total, [normed["x"]])
    equal("q scale", (q, scale), dsa.per_token_cast_to_fp8(y, a["use_ue8m0"]))
    if y.shape[1] > 128:  # with 128 channels, a single group, the kernel sums in another order than `rms_norm`
        equal("y", [y], [dsa.rms_norm(**normed)])
    return check_norm(normed, [y])


# apply_rotary


def rotation(
    new: Maker,
    shape: tuple[int, ...] = (3, 2, 80),
    rotated: int = 64,
    dtype: torch.dtype = BF16,
    interleaved: bool = True,
    dims: str = "first",
    out: str = "",
) -> Given:
    """Make arguments of `apply_rotary`. out: "" for None, "x" for a rotation in place, "new" for another tensor."""
    x, angles = new.f32(*shape).to(dtype), 100 * new.f32(shape[0], rotated // 2)
    outputs = {"": None, "x": x, "new": new.f32(*shape).to(dtype)}
    kind = {"interleaved": interleaved, "dims": dims}
    return {"x": x, "cos": angles.cos(), "sin": angles.sin(), **kind, "out": outputs[out]}


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True, dims: str = "last"
) -> torch.Tensor:
    """Return x [T, ..., D] in float64, with pairs of the first or last R channels (`dims`) multiplied by cos + i sin,
    both [T, R / 2]. interleaved: the pairs are (2i, 2i + 1), otherwise (i, i + R / 2)."""
    out, channels = x.double().clone(), 2 * cos.shape[1]
    part = out[..., :channels] if dims == "first" else out[..., out.shape[-1] - channels :]
    real, imaginary = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
    factor = torch.complex(cos.double(), sin.double()).view(len(x), *[1] * (x.dim() - 2), cos.shape[1])
    z = torch.complex(real.contiguous(), imaginary.contiguous()) * factor
    part[:] = torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)
    return out


def check_rotation(a: Given, found: Results) -> float:
    """Require the reference's bits, and compare with float64. For a call in place, a["out"] is a copy of x from before
    the call."""
    x = a["out"] if found[0] is a["x"] else a["x"]
    given = {"x": x, "cos": a["cos"], "sin": a["sin"], "interleaved": a["interleaved"], "dims": a["dims"]}
    for got in found:
        equal("out", [got], [dsa.reference.apply_rotary(**given)])
    rounding = 1.04 * ROUNDING[found[0].dtype]  # 1.04: the two products are rounded to fp32 before they are added
    return assert_close("out", found[0], rotated(**given), abs_tol=1e-5, rel_tol=rounding, cos_tol=5e-6)


# hyper_collapse, hyper_collapse_independent, hyper_head, hyper_expand


def collapse(
    new: Maker,
    tokens: int = 3,
    n: int = 4,
    channels: int = 16,
    dtype: torch.dtype = BF16,
    size: float = 1.0,
    **options: float,
) -> Given:
    streams, mix = new.f32(tokens, n, channels).to(dtype), size * new.f32(tokens, (2 + n) * n)
    tensors = {"streams": streams, "mix": mix, "base": new.f32((2 + n) * n), "scale": 0.5 + new.f32(3).sigmoid()}
    return {**tensors, "iterations": 3, "eps": 1e-6, "hc_eps": 1e-6, **options}


def collapse_independent(
    new: Maker, tokens: int = 3, n: int = 4, channels: int = 16, magnitude: float = 2.0, **options: object
) -> Given:
    a = collapse(new, tokens, n, channels, **options)
    own = {"mix": a["mix"][:, : 2 * n].contiguous(), "base": a["base"][: 2 * n], "scale": a["scale"][:2]}
    del a["iterations"]
    return {**a, **own, "magnitude": magnitude}


def head(new: Maker, **sizes: object) -> Given:
    a = collapse(new, **sizes)
    n = a["streams"].shape[1]
    tensors = {"streams": a["streams"], "mix": a["mix"][:, :n].contiguous(), "base": a["base"][:n]}
    return {**tensors, "scale": a["scale"][:1], "eps": a["eps"], "hc_eps": a["hc_eps"]}


def logits(a: Given, counts: list[int]) -> tuple[torch.Tensor, ...]:
    """Return mix / rms(a token's streams) * scale + base in float64, split into parts of `counts` channels. Each part
    has its own scale."""
    root = (a["streams"].double().square().mean((1, 2)) + a["eps"]).sqrt()[:, None]
    scale = a["scale"].double().repeat_interleave(torch.tensor(counts, device=root.device))
    return (a["mix"].double() / root * scale + a["base"].double()).split(counts, 1)


def weighted_sum(a: Given, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tn,tnd->td", weights.sigmoid() + a["hc_eps"], a["streams"].double())


def collapsed(a: Given) -> Results:
    """Return `hyper_collapse`'s (x, post, comb) by the formula, in float64."""
    n = a["streams"].shape[1]
    pre, post, comb = logits(a, [n, n, n * n])
    comb = comb.unflatten(1, (n, n)).softmax(2) + a["hc_eps"]
    for step in range(2 * a["iterations"] - 1):
        comb = comb / (comb.sum(2 if step % 2 else 1, keepdim=True) + a["hc_eps"])
    return weighted_sum(a, pre), 2 * post.sigmoid(), comb


def near(name: str, got: torch.Tensor, expected: torch.Tensor) -> float:
    return assert_close(name, got, expected, abs_tol=2e-5, rel_tol=NEIGHBOUR[got.dtype], cos_tol=COSINE[got.dtype])


def check_collapse(a: Given, found: Results) -> float:
    x, *weights = collapsed(a)
    for name, got, expected in zip(("post", "comb"), found[1:], weights, strict=True):
        assert_close(name, got, expected, abs_tol=2e-6, rel_tol=3e-5)
    return near("x", found[0], x)


def check_independent(a: Given, found: Results) -> float:
    n = a["streams"].shape[1]
    pre, post = logits(a, [n, n])
    expected = a["magnitude"] * post.sigmoid() + a["hc_eps"]
    assert_close("post", found[1], expected, abs_tol=2e-6, rel_tol=3e-5)
    return near("x", found[0], weighted_sum(a, pre))


def check_head(a: Given, found: Results) -> float:
    return near("x", found[0], weighted_sum(a, *logits(a, [a["streams"].shape[1]])))


def expand(
    new: Maker, tokens: int = 3, n: int = 4, channels: int = 16, dtype: torch.dtype = BF16, mixed: bool = True
) -> Given:
    y, streams = new.f32(tokens, channels).to(dtype), new.f32(tokens, n, channels).to(dtype)
    comb = new.positive(tokens, n, n) if mixed else None
    return {"y": y, "streams": streams, "post": new.positive(tokens, n), "comb": comb}


def check_expand(a: Given, found: Results) -> float:
    y, streams, post = (a[name].double() for name in ("y", "streams", "post"))
    mixed = streams if a["comb"] is None else a["comb"].double().mT @ streams
    return near("streams", found[0], post[..., None] * y[:, None] + mixed)


# hyper_mix, hyper_expand_mix, hyper_collapse_norm_cast_to_fp8, hyper_collapse_independent_norm_cast_to_fp8


def parts_of(weight: torch.Tensor) -> torch.Tensor:
    """Return bf16 [3, *weight.shape]: three matrices whose sum is the fp32 `weight`."""
    parts = []
    for _ in range(3):
        parts.append(weight.to(BF16))
        weight = weight - parts[-1].float()
    return torch.stack(parts)


def mix(new: Maker, tokens: int = 3, n: int = 4, channels: int = 16, outputs: int = 24) -> Given:
    weight = 0.02 * new.f32(outputs, n * channels)
    return {"streams": new.bf16(tokens, n, channels), "parts": parts_of(weight)}


def check_mix(a: Given, found: Results) -> float:
    """Compare with float64; errors are relative to the sum of the products' magnitudes."""
    v, weight = a["streams"].flatten(1).double(), a["parts"].double().sum(0)
    return within("mix", found[0], v @ weight.T, 4e-6 * (v.abs() @ weight.abs().T))


def expand_and_mix(
    new: Maker, tokens: int = 3, n: int = 4, channels: int = 16, outputs: int = 24, mixed: bool = True
) -> Given:
    return expand(new, tokens, n, channels, mixed=mixed) | {"parts": mix(new, 1, n, channels, outputs)["parts"]}


def check_expand_and_mix(a: Given, found: Results) -> float:
    """Require the same bits as `hyper_expand` followed by `hyper_mix`, and compare both results with float64."""
    streams = dsa.hyper_expand(a["y"], a["streams"], a["post"], a["comb"])
    projected = {"streams": streams, "parts": a["parts"]}
    equal("streams mix", found, (streams, dsa.hyper_mix(**projected)))
    check_mix(projected, found[1:])
    return check_expand(a, found[:1])


def sublayer(
    new: Maker,
    tokens: int = 3,
    n: int = 4,
    channels: int = 256,
    norm_eps: float = 1e-6,
    use_ue8m0: bool = True,
    made: Callable[..., Given] = collapse,
    **options: float,
) -> Given:
    """Make arguments of `hyper_collapse_norm_cast_to_fp8` whose tokens have magnitudes from 1e-3 to 1e3. A token's mix
    has the magnitude of the token's streams, because mix is a projection of them."""
    a, size = made(new, tokens, n, channels, **options), every_size(new, tokens)[:, None]
    sized = {"streams": (a["streams"] * size[..., None]).to(BF16), "mix": a["mix"] * size}
    return {**a, **sized, "weight": new.f32(channels), "norm_eps": norm_eps, "use_ue8m0": use_ue8m0}


def independent_sublayer(new: Maker, pad_scales: bool = False, **sizes: object) -> Given:
    return sublayer(new, made=collapse_independent, **sizes) | {"pad_scales": pad_scales}


def check_sublayer(a: Given, found: Results) -> float:
    """Require the same bits as the collapse followed by `rms_norm_cast_to_fp8`, and compare the norm with float64."""
    own = {name: a[name] for name in a if name not in ("weight", "norm_eps", "use_ue8m0", "pad_scales")}
    x, *weights = (dsa.hyper_collapse_independent if "magnitude" in a else dsa.hyper_collapse)(**own)
    y, q, scale = dsa.rms_norm_cast_to_fp8(x, a["weight"], a["norm_eps"], a["use_ue8m0"])
    if a.get("pad_scales"):
        _, of_zeros = dsa.per_token_cast_to_fp8(torch.zeros_like(y[:, :128]), a["use_ue8m0"])
        scale = torch.cat((scale, of_zeros.expand(-1, -scale.shape[1] % 4)), 1)
    cast = y, q, scale
    equal("y q q_scale post comb" if len(weights) == 2 else "y q q_scale post", found, (*cast, *weights))
    return check_norm({"x": x, "weight": a["weight"], "eps": a["norm_eps"]}, found[:1])


CASES = [
    Case("rms_norm", norm, check_norm, {"shape": (37, 2, 1544)}, more=({"weighted": False},)),
    Case("rms_norm_rotary", norm_of_heads, check_norm_of_heads, {"tokens": 37, "heads": 3, "channels": 520}),
    Case("rms_norm_cast_to_fp8", norm_with_cast, check_norm_with_cast, {"tokens": 37, "channels": 640}),
    Case(
        "add_rms_norm_cast_to_fp8",
        partial(norm_with_cast, use_ue8m0=False, added=True),
        check_norm_with_cast,
        {"tokens": 37, "channels": 640},
    ),
    Case(
        "apply_rotary",
        rotation,
        check_rotation,
        {"shape": (37, 3, 104)},
        more=({"dims": "last"}, {"interleaved": False}, {"interleaved": False, "dims": "last"}),
    ),
    Case(
        "apply_rotary into out",
        partial(rotation, shape=(3, 80), interleaved=False, dims="last", out="new"),
        check_rotation,
        {"shape": (37, 3, 104), "out": "x"},
        more=({"out": "new"}, {"out": "new", "interleaved": True, "dims": "first"}),
        written=("out",),
    ),
    Case("hyper_collapse", collapse, check_collapse, {"tokens": 37, "channels": 264, "iterations": 20}),
    Case("hyper_collapse_independent", collapse_independent, check_independent, {"tokens": 37, "channels": 264}),
    Case("hyper_expand", expand, check_expand, {"tokens": 37, "channels": 264}, more=({"mixed": False},)),
    Case("hyper_head", head, check_head, {"tokens": 37, "channels": 264}),
    # 1793 tokens select the persistent variant of hyper_mix_sm90.py, whose partial sums a second kernel adds. 300
    # tokens select the variant with clusters in the same file. 37 tokens select the kernel for few tokens.
    Case(
        "hyper_mix",
        mix,
        check_mix,
        {"tokens": 1793, "channels": 128},
        more=({"tokens": 300}, {"tokens": 37, "channels": 264, "outputs": 13}),
    ),
    Case(
        "hyper_collapse_norm_cast_to_fp8",
        sublayer,
        check_sublayer,
        {"tokens": 37, "channels": 640, "iterations": 20},
    ),
    Case(
        "hyper_collapse_independent_norm_cast_to_fp8",
        independent_sublayer,
        check_sublayer,
        {"tokens": 37, "channels": 640},
        more=({"pad_scales": True},),
    ),
    # Four tokens select the fused kernel. 40 tokens select the separate kernels of `hyper_expand` and `hyper_mix`.
    Case(
        "hyper_expand_mix",
        expand_and_mix,
        check_expand_and_mix,
        {"tokens": 4, "channels": 264},
        more=({"mixed": False}, {"tokens": 40, "channels": 128}),
    ),
]
