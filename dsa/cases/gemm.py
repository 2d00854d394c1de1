"""Cases of casts to FP8, of FP4 weights, and of matrix products."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

import dsa
from dsa.cases.case import BF16, F32, Case, Given, Hostile, Kept, Maker, Results
from dsa.testing import calc_diff

BLOCK = 128
BYTE = torch.uint8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def sylvester(n: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return the Hadamard matrix H[i, j] = (-1)^popcount(i & j) in float64; n must be a power of two."""
    h = torch.ones(1, 1, dtype=torch.double, device=device)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of the numbers in fp32, with one bit pattern for all NaNs."""
    x = x.float()
    return x.view(torch.int32).masked_fill(x.isnan(), -1)


def check_bits(names: str, found: Results, expected: Results) -> None:
    """Require equal shapes, dtypes and numbers, including the signs of zeros."""
    for name, got, right in zip(names.split(), found, expected, strict=True):
        if (got.shape, got.dtype) != (right.shape, right.dtype):
            raise AssertionError(f"{name}: expected {right.dtype} of {right.shape}, got {got.dtype} of {got.shape}")
        if wrong := int((bits(got) != bits(right)).sum()):
            raise AssertionError(f"{name}: {wrong} of {got.numel()} numbers differ")


def repeated(scale: torch.Tensor, shape: Sequence[int], block: tuple[int, int]) -> torch.Tensor:
    """Return the scales in float64, one per element of `shape`. block: (rows, columns) that share a scale."""
    rows, columns = (max(1, min(size, n)) for size, n in zip(block, shape[-2:]))
    by_row = scale.double().repeat_interleave(rows, -2)[..., : shape[-2], :]
    return by_row.repeat_interleave(columns, -1)[..., : shape[-1]]


def dequantised(q: torch.Tensor, scale: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Return q * scale in float64; a scale covers `rows` rows and 128 channels."""
    return q.double() * repeated(scale, q.shape, (rows, BLOCK))


# Casts


def check_cast(
    name: str,
    found: Results,
    right: torch.Tensor,
    use_ue8m0: bool,
    dtype: torch.dtype = F32,
    block: tuple[int, int] = (1, BLOCK),
) -> None:
    """Check the scales and values of an FP8 cast of `right`.

    right is in float64; the op rounds it to `dtype` before the cast. block: (rows, columns) that share a scale. A scale
    must be max(amax, 1e-4) / 448, where amax is the block's largest magnitude. With use_ue8m0 it must be rounded up to
    a power of two. A value must be off by at most half an e4m3 step. Blocks whose scale is not finite are not checked.
    """
    q, scale = found
    rows, columns = (max(1, min(size, n)) for size, n in zip(block, right.shape[-2:]))
    padded = torch.nn.functional.pad(right.abs(), (0, -right.shape[-1] % columns, 0, -right.shape[-2] % rows))
    amax = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-1, -3))
    eps, tiny = max(torch.finfo(dtype).eps, 1e-6), torch.finfo(dtype).smallest_normal
    ratio = scale.double() / (amax.clamp(min=1e-4) / 448)
    if use_ue8m0:
        wrong = (torch.frexp(scale).mantissa != 0.5) | (ratio < 1 - eps) | (ratio >= 2 * (1 + eps))
    else:
        wrong = (ratio - 1).abs() > eps
    if (wrong & scale.isfinite()).any():
        raise AssertionError(f"{name}'s scale: {int(wrong.sum())} of {wrong.numel()} are wrong")
    each = repeated(scale, right.shape, block)
    error = (q.double() * each - right).abs()
    # e4m3 has 3 mantissa bits, so half a step is at most 2^-4 of a number. For subnormals half a step is 2^-10 of the
    # scale; the tolerance is twice that.
    allowed = (2**-4 + eps) * right.abs() + 2**-9 * each + eps * tiny
    if (~(error <= allowed) & each.isfinite()).any():
        raise AssertionError(f"{name}: up to {(error / allowed).nan_to_num(0.0).max():.3g} times the error of rounding")


def token_cast(
    new: Maker,
    shape: Sequence[int] = (3, 256),
    dtype: torch.dtype = BF16,
    use_ue8m0: bool = False,
    gran_k: int = BLOCK,
    hadamard: bool = True,
) -> Given:
    sizes = torch.logspace(-6, 4, shape[-2], device=new.device)[:, None]
    return {"x": (new.f32(*shape) * sizes).to(dtype), "use_ue8m0": use_ue8m0, "gran_k": gran_k, "hadamard": hadamard}


def check_token_cast(a: Given, found: Results) -> float:
    """Require the reference's bits, and compare with float64."""
    x, group, use_ue8m0 = a["x"], a["gran_k"], a["use_ue8m0"]
    # With ue8m0, results on a GPU have the bits of results on a CPU. Without it, PyTorch divides by 448 on a CPU but
    # multiplies by 1 / 448 on a GPU, as the kernel does. So without ue8m0 the reference runs on the op's device.
    expected = dsa.reference.per_token_cast_to_fp8(**a | {"x": x.cpu() if use_ue8m0 else x})
    check_bits("q scale", [y.cpu() for y in found], [y.cpu() for y in expected])
    right = x.double()
    if a["hadamard"]:
        right = (right.unflatten(-1, (-1, group)) @ sylvester(group, x.device) / group**0.5).flatten(-2)
    check_cast("q", found, right, use_ue8m0, x.dtype if a["hadamard"] else F32, (1, group))
    return 0.0


def scatter(
    new: Maker,
    tokens: int = 0,
    channels: int = 256,
    k: int = 2,
    dtype: torch.dtype = BF16,
    use_ue8m0: bool = False,
) -> Given:
    """Make arguments of `scatter_cast_to_fp8`. Each token goes to k rows, and each row gets one token. tokens = 0:
    three tokens with two fixed rows each."""
    if tokens:
        places = new.order(1, tokens * k, tokens * k).view(tokens, k).int()
    else:
        places = new.ints([[0, 5], [3, 1], [4, 2]])
    sizes = torch.logspace(-6, 4, channels, device=new.device)
    x = (new.f32(len(places), channels) * sizes).to(dtype)
    return {"x": x, "places": places, "use_ue8m0": use_ue8m0}


def check_scatter(a: Given, found: Results) -> float:
    """In the rows that receive a token, require the bits of `per_token_cast_to_fp8` and compare with float64."""
    places, x = a["places"], a["x"]
    inside = (places >= 0) & (places < places.numel())
    rows, tokens = places[inside].long(), inside.nonzero()[:, 0]
    q, scale = dsa.per_token_cast_to_fp8(x, a["use_ue8m0"])
    stored = [y.view(BYTE)[rows].view(y.dtype) for y in found]
    check_bits("q scale", stored, [y.view(BYTE)[tokens].view(y.dtype) for y in (q, scale)])
    check_cast("q", stored, x.double()[tokens], a["use_ue8m0"])
    return 0.0


def other_places(given: Given, place: tuple[int, int]) -> Kept:
    """Return a function that keeps all rows except the row that the number at `place` names in the valid call."""
    row = int(given["places"][place])
    return lambda results: [x[[i for i in range(len(x)) if i != row]] for x in results]


def rotary(
    new: Maker,
    tokens: int = 3,
    heads: int = 4,
    dim: int = 128,
    rotated: int = 64,
    groups: int = 2,
    dtype: torch.dtype = BF16,
    use_ue8m0: bool = False,
) -> Given:
    sizes = torch.logspace(-6, 4, heads * dim, device=new.device).view(heads, dim)
    x = (new.f32(tokens, heads, dim) * sizes).to(dtype)
    return {"x": x, **new.angles(tokens, rotated), "groups": groups, "use_ue8m0": use_ue8m0}


def check_rotary(a: Given, found: Results) -> float:
    """Require the same bits as `apply_rotary` followed by `per_token_cast_to_fp8`, and compare with float64."""
    x, cos, sin = a["x"], a["cos"], a["sin"]

    def by_group(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(1, (a["groups"], -1)).transpose(0, 1).flatten(2).flatten(0, 1)

    rotated = dsa.apply_rotary(x, cos, sin, interleaved=True, dims="last")
    check_bits("q scale", found, dsa.per_token_cast_to_fp8(by_group(rotated), a["use_ue8m0"]))
    right, first = x.double(), x.shape[2] - 2 * cos.shape[1]
    pairs = torch.view_as_complex(right[..., first:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(-2)
    right = torch.cat((right[..., :first], turned), -1)
    check_cast("q", found, by_group(right), a["use_ue8m0"], x.dtype)
    return 0.0


def swiglu(
    new: Maker,
    shape: Sequence[int] = (3, 200),
    dtype: torch.dtype = BF16,
    use_ue8m0: bool = True,
    limit: float | None = 2.0,
    halves: bool = False,
    pad_scales: bool = False,
) -> Given:
    """Make arguments of `swiglu_cast_to_fp8`. halves: gate and up are the halves of one tensor's last dimension."""
    sizes = torch.logspace(-4, 3, shape[-2], device=new.device)[:, None]
    gate, up = (4 * new.f32(*shape)).to(dtype), (new.f32(*shape) * sizes).to(dtype)
    if halves:
        gate, up = torch.cat((gate, up), -1).chunk(2, -1)
    return {"gate": gate, "up": up, "use_ue8m0": use_ue8m0, "limit": limit, "pad_scales": pad_scales}


def swiglu_bounds(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> Results:
    """Return (smallest allowed h, exact h, largest allowed h) of h = silu(gate) * up, with gate and up clamped by
    `limit`.

    The docstring of `swiglu_cast_to_fp8` bounds the error of h. Each h is rounded to the operands' dtype and returned
    as fp32.
    """
    g, u = gate.double(), up.double()
    if limit is not None:
        limit = torch.tensor(limit, dtype=F32).item()
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = (g * torch.sigmoid(g) * u).masked_fill(g == -math.inf, math.nan)  # silu(-inf) = -inf * 0 is NaN
    slack = (h.abs() * 2**-20 + 1e-36 * u.abs().clamp_min(1)).where(h.isfinite(), 0.0)
    return [(h + s).float().to(gate.dtype).float() for s in (-slack, 0.0, slack)]


def gate(new: Maker, shape: Sequence[int] = (3, 200), halves: bool = False, **options: object) -> Given:
    a = swiglu(new, shape, limit=None, halves=halves, **options)
    return {"gate": a["gate"], "x": a["up"], "use_ue8m0": a["use_ue8m0"], "pad_scales": a["pad_scales"]}


def gate_bounds(gate: torch.Tensor, x: torch.Tensor) -> Results:
    """Return `swiglu_bounds` of h = sigmoid(gate) * x."""
    h = torch.sigmoid(gate.double()) * x.double()
    slack = (h.abs() * 2**-20 + 1e-36 * x.double().abs()).where(h.isfinite(), 0.0)
    return [(h + s).float().to(gate.dtype).float() for s in (-slack, 0.0, slack)]


def within(name: str, found: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """Require found numbers between low and high, and NaN where both bounds are NaN."""
    inside = ((found >= low) & (found <= high)) | (found.isnan() & low.isnan() & high.isnan())
    if not inside.all():
        raise AssertionError(f"{name}: {int((~inside).sum())} of {inside.numel()} numbers are outside of the bounds")


def check_swiglu(a: Given, found: Results) -> float:
    return check_bounds(a, found, swiglu_bounds(a["gate"], a["up"], a["limit"]))


def check_gate(a: Given, found: Results) -> float:
    return check_bounds(a, found, gate_bounds(a["gate"], a["x"]))


def check_bounds(a: Given, found: Results, bounds: Results) -> float:
    """Require scales and values between those of the smallest and the largest h. bounds: as from `swiglu_bounds`."""
    (q, scale), channels = found, a["gate"].shape[-1]

    def scale_of(h: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(h, (0, -channels % (4 * BLOCK if a["pad_scales"] else BLOCK)))
        return dsa.reference.per_token_cast_to_fp8(padded, a["use_ue8m0"])[1]

    low, exact, high = bounds
    smallest = torch.minimum(low.abs(), high.abs()).where(low.signbit() == high.signbit(), 0.0)
    within("scale", scale, scale_of(smallest), scale_of(torch.maximum(low.abs(), high.abs())))
    each = 1 / scale.repeat_interleave(BLOCK, -1)[..., :channels]
    lowest, cast, highest = ((h * each).clamp(-448, 448).to(q.dtype).float() for h in (low, exact, high))
    within("q", q.float(), lowest, highest)
    return (q.float() - cast).abs().nan_to_num().max().item() if q.numel() else 0.0


def weight_cast(
    new: Maker,
    rows: int = 150,
    columns: int = 140,
    dtype: torch.dtype = F32,
    use_ue8m0: bool = False,
    block: int = BLOCK,
) -> Given:
    return {"w": new.f32(rows, columns).to(dtype), "use_ue8m0": use_ue8m0, "block": block}


def check_weight_cast(a: Given, found: Results) -> float:
    check_cast("q", found, a["w"].double(), a["use_ue8m0"], block=(a["block"], a["block"]))
    return 0.0


def weight(new: Maker, rows: int = 150, columns: int = 140, dtype: torch.dtype = BF16, block: int = BLOCK) -> Given:
    scale = new.positive(-(-rows // block), -(-columns // block))
    return {"q": new.e4m3(rows, columns), "scale": scale, "dtype": dtype, "block": block}


def check_weight(a: Given, found: Results) -> float:
    """Require the bits of q * scale, rounded to fp32 and then to the dtype. The product is exact in float64, because q
    has 4 significant bits and the scale 24."""
    right = a["q"].double() * repeated(a["scale"], a["q"].shape, (a["block"], a["block"]))
    check_bits("w", found, [right.float().to(a["dtype"])])
    return 0.0


# FP4 weights


def fp4(new: Maker, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random (packed uint8 [..., N, K / 2], scale e8m0 [..., N, K / 32]) for the shape [..., N, K]. The largest
    scale is at most 2^14 times the smallest, as `widen_fp4` requires within a block."""
    *rows, channels = shape
    packed = new.below(256, *rows, channels // 2, dtype=BYTE)
    return packed, (120 - new.below(15, *rows, channels // 32, dtype=BYTE)).view(torch.float8_e8m0fnu)


def fp4_weight(new: Maker, shape: Sequence[int] = (2, 140, 160)) -> Given:
    packed, scale = fp4(new, *shape)
    return {"packed": packed, "scale": scale}


def fp4_codes(packed: torch.Tensor) -> torch.Tensor:
    """Unpack [..., K / 2] bytes to [..., K] codes, the low nibble first."""
    packed = packed.view(BYTE).int()
    return torch.stack((packed % 16, packed // 16), -1).flatten(-2)


def fp4_values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the numbers [..., N, K] of an FP4 weight in float64: e2m1 * scale."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.double, device=packed.device)
    return values[fp4_codes(packed)] * scale.double().repeat_interleave(32, -1)


def check_block_scales(a: Given, found: Results) -> float:
    """Require each block's scale: 2^-6 times the largest scale of a group with a nonzero code, and at least 2^-126."""
    live = (fp4_codes(a["packed"]) % 8 != 0).unflatten(-1, (-1, 32)).any(-1)
    scales = a["scale"].double().where(live, 0.0)
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4, 0, -scales.shape[-2] % BLOCK))
    largest = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, BLOCK)).amax((-1, -3))
    check_bits("s", found, [(largest * 2**-6).clamp(min=2**-126).float()])
    return 0.0


def check_widened(a: Given, found: Results) -> float:
    check_block_scales(a, found[1:])
    back, right = dequantised(*found, rows=BLOCK), fp4_values(a["packed"], a["scale"])
    if not torch.equal(back, right) or not torch.equal(back.signbit(), right.signbit()):
        raise AssertionError(f"q: {int((back != right).sum())} of {right.numel()} weights differ")
    return 0.0


# Products


def activations(new: Maker, rows: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return new.e4m3(rows, channels), new.positive(rows, blocks(channels))


def product(new: Maker, rows: int = 3, columns: int = 136, channels: int = 160, out_dtype: torch.dtype = F32) -> Given:
    b = new.e4m3(columns, channels), new.positive(blocks(columns), blocks(channels))
    return {"a": activations(new, rows, channels), "b": b, "out_dtype": out_dtype}


def experts(
    new: Maker, is_fp4: bool, sizes: Sequence[int] | None, tokens: int, columns: int, channels: int, after: int
) -> Given:
    """Make a, b, ends and rows of a grouped product.

    sizes   number of rows of each expert. None: fixed sizes and `rows`
    tokens  number of rows of `a`, from which `rows` selects at random; 0: no `rows`
    after   number of rows after those of the last expert
    """
    if sizes is None:
        sizes, tokens, rows = (2, 0, 2), 5, new.ints([4, 0, 0, 2])
    else:
        rows = new.below(tokens, sum(sizes) + after) if tokens else None
    a, shape = activations(new, tokens or sum(sizes) + after, channels), (len(sizes), columns, channels)
    if is_fp4:
        packed, scale = fp4(new, *shape)
        b = packed, scale, dsa.reference.fp4_block_scales(packed, scale)
    else:
        b = new.e4m3(*shape), new.positive(len(sizes), blocks(columns), blocks(channels))
    return {"a": a, "b": b, "ends": new.ints([*accumulate(sizes)]), "rows": rows}


def grouped(
    new: Maker,
    is_fp4: bool = False,
    sizes: Sequence[int] | None = None,
    tokens: int = 0,
    columns: int = 16,
    channels: int = 160,
    out_dtype: torch.dtype = BF16,
    weighted: bool = True,
    after: int = 0,
    expected_rows: int | None = None,
) -> Given:
    given = experts(new, is_fp4, sizes, tokens, columns, channels, after)
    count = len(given["a"][0] if given["rows"] is None else given["rows"])
    factors = new.positive(count) if weighted else None
    expected = 3 if sizes is None else expected_rows
    return given | {"out_dtype": out_dtype, "weights": factors, "expected_rows": expected}


def experts_swiglu(
    new: Maker,
    is_fp4: bool = False,
    sizes: Sequence[int] | None = None,
    tokens: int = 0,
    inner: int = 128,
    channels: int = 160,
    limit: float | None = 2.0,
    use_ue8m0: bool = False,
    dtype: torch.dtype = BF16,
    after: int = 0,
    expected_rows: int | None = None,
    pad_scales: bool = False,
) -> Given:
    given = experts(new, is_fp4, sizes, tokens, 2 * inner, channels, after)
    expected = 3 if sizes is None else expected_rows
    options = {"limit": limit, "use_ue8m0": use_ue8m0, "dtype": dtype, "expected_rows": expected}
    return given | options | {"pad_scales": pad_scales}


def matrix(b: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a weight in float64. b: (FP8 values, scales) or (FP4 values, scales, block scales) of the weight."""
    return fp4_values(*b[:2]) if len(b) == 3 else dequantised(*b, rows=BLOCK)


def sums(a: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, size) in float64. y is the product. For a grouped product, y has only the rows that belong to an
    expert.

    size is the root of the sum of squared products: the expected magnitude of y if products have random signs.
    """

    def of_one(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ w.T, (x.square() @ w.square().T).sqrt()

    x = dequantised(*a["a"])
    if "ends" not in a:
        return of_one(x, matrix(a["b"]))
    ends = [0, *a["ends"].tolist()]
    x = x[: ends[-1]] if a["rows"] is None else x[a["rows"][: ends[-1]].long()]
    empty = x.new_empty(0, a["b"][0].shape[1])
    parts = [(empty, empty)]
    for e, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            parts.append(of_one(x[begin:end], matrix([part[e] for part in a["b"]])))
    y, size = (torch.cat(part) for part in zip(*parts))
    factors = a.get("weights")
    return (y, size) if factors is None else tuple(factors[: ends[-1], None].double() * part for part in (y, size))


def check_product(a: Given, found: Results) -> float:
    """Compare with float64. Rows that belong to no expert are not checked.

    Tensor cores add the products of 128 channels with about 14 bits, relative to the largest product. So an error of
    5e-3 of `size` (see `sums`) is allowed. The sum of all blocks is rounded to the result's dtype once.
    """
    expected, size = sums(a)
    y = found[0][: len(expected)]
    error = (y.double() - expected).abs()
    step = {F32: 0.0, BF16: 2**-8}.get(y.dtype, 2**-11)
    least = 0.0 if y.dtype in (F32, BF16) else 2**-25  # half the spacing of fp16 subnormals
    if not (error <= 5e-3 * size + step * expected.abs() + least).all():
        raise AssertionError(f"y: off by up to {(error / size).nan_to_num(0.0).max():.3g} of the size of its products")
    if not (diff := calc_diff(y, expected)) <= (tolerance := 1e-7 if y.dtype == F32 else 1e-5):
        raise AssertionError(f"y: calc_diff {diff:.3g} is above {tolerance}")
    return (error / size).max().item() if error.numel() else 0.0


def check_fp4_product(a: Given, found: Results) -> float:
    """Require the same bits as `grouped_fp8_gemm_nt` with the widened weights, and compare with float64."""
    used = a["ends"][-1]
    expected = dsa.grouped_fp8_gemm_nt(**a | {"b": dsa.widen_fp4(*a["b"][:2])})
    check_bits("y", [found[0][:used]], [expected[:used]])
    return check_product(a, found)


def check_experts_swiglu(a: Given, found: Results) -> float:
    """Require the same bits as `grouped_fp8_gemm_nt`, with FP4 weights widened to FP8, followed by
    `swiglu_cast_to_fp8`. Compare the results of both ops with float64."""
    used, b = a["ends"][-1], a["b"] if len(a["b"]) == 2 else dsa.widen_fp4(*a["b"][:2])
    gate_up = dsa.grouped_fp8_gemm_nt(a["a"], b, a["ends"], a["dtype"], rows=a["rows"])
    check_product(a, [gate_up])
    gate, up = gate_up[:used].chunk(2, -1)
    options = {"use_ue8m0": a["use_ue8m0"], "limit": a["limit"]}
    q, scale = (x[:used] for x in found)
    own = [q, scale[:, : gate.shape[1] // BLOCK]]  # the columns that `pad_scales` adds must only be finite
    assert scale.isfinite().all() or not own[1].isfinite().all()
    check_bits("q scale", own, dsa.swiglu_cast_to_fp8(gate, up, **options))
    return check_swiglu({"gate": gate, "up": up, **options, "pad_scales": False}, own)


def linear(
    new: Maker,
    tokens: int = 3,
    channels: int = 64,
    rows: int = 40,
    dtype: torch.dtype = BF16,
    scale: float = 0.5,
    scaled_from: int = 24,
    exact: bool = False,
) -> Given:
    """Make arguments of `linear_fp32`. exact: operands whose products and sums, in any order, are exact in fp32."""
    if exact:
        x = new.below(5, tokens, channels) - 2
        w = (new.below(3, rows, channels) - 1) * 2.0 ** -round(math.log2(channels) / 2)
    else:
        x, w = new.f32(tokens, channels), new.f32(rows, channels)
    return {"x": x.to(dtype), "weight": w.to(dtype), "scale": scale, "scaled_from": scaled_from}


def linear_sums(a: Given) -> torch.Tensor:
    y = a["x"].double() @ a["weight"].double().T
    return torch.cat((y[:, : a["scaled_from"]], y[:, a["scaled_from"] :] * a["scale"]), 1)


def check_linear(a: Given, found: Results) -> float:
    size = linear_sums(a | {"x": a["x"].abs(), "weight": a["weight"].abs(), "scale": abs(a["scale"])})
    error = (found[0].double() - linear_sums(a)).abs()
    if not (error <= 4e-6 * size).all():  # written so that a NaN fails
        raise AssertionError(f"y: off by up to {(error / size).max():.3g} of the sum of its products' sizes")
    return (error / size).max().item() if error.numel() else 0.0


# Hostile contents (see case.Hostile).


def other_experts(given: Given, place: tuple[int]) -> Kept:
    """Return a function that keeps the rows of all experts except two: the expert whose end is at `place`, and the next
    expert, which begins at this end."""
    ends, e = [0, *given["ends"].tolist()], place[0]
    kept = [m for m in range(ends[-1]) if not ends[e] <= m < ends[min(e + 2, len(ends) - 1)]]
    return lambda results: [x[kept] for x in results]


def other_numbers(given: Given, place: tuple[int]) -> Kept:
    """Return a function that keeps all rows that belong to an expert, except the row at `place`."""
    kept = [m for m in range(int(given["ends"][-1])) if m != place[0]]
    return lambda results: [x[kept] for x in results]


# name -> (tokens, sizes, after) of `experts`. Each name selects another variant of the kernels.
HOSTILE_SIZES = {
    "few": (0, (10, 20, 0, 11), 19),
    "few of many": (50, (10, 20, 0, 11), 49),
    "gathering": (50, (10, 60, 0, 20), 0),
    "gathering more": (50, (100, 0, 70, 130), 0),
    "dynamic": (0, (300, 0, 850, 50), 0),
    "dynamic, few of many": (0, (30, 0, 200, 71), 899),
    "copying": (50, (1000, 3200), 0),
    "copying few of many": (50, (100, 233), 3867),
}


def hostile_experts(**shape: int) -> dict[str, Hostile]:
    found = {}
    for name, (tokens, rows, after) in HOSTILE_SIZES.items():
        sizes = {"tokens": tokens, "sizes": rows, "after": after, "channels": 256, **shape}
        each_end = [(e,) for e in range(len(rows))]
        found[f"ends {name}"] = Hostile(other_experts, lambda ends, places=each_end: places, sizes)
        if tokens:
            places = [(m,) for m in (0, rows[0] - 1, rows[0], sum(rows) + after - 1)]
            found[f"rows {name}"] = Hostile(other_numbers, lambda rows, places=places: places, sizes)
    return found


_PRODUCTS = {"columns": 256, "weighted": False}
_EXPERTS = {"sizes": (3, 0, 70, 1, 9), "tokens": 9, "channels": 400}
CASES = [
    Case(
        "per_token_cast_to_fp8",
        token_cast,
        check_token_cast,
        {"shape": (33, 384)},
        more=({"hadamard": False, "use_ue8m0": True},),
    ),
    Case(
        "scatter_cast_to_fp8",
        scatter,
        check_scatter,
        {"tokens": 33, "k": 3},
        hostile={
            "places": Hostile(other_places, lambda places: [(0, 0), (5, 1), (11, 1)], {"tokens": 12}),
        },
    ),
    Case("rotary_cast_to_fp8", rotary, check_rotary, {"tokens": 17, "heads": 6, "dim": 256, "groups": 3}),
    Case(
        "swiglu_cast_to_fp8",
        swiglu,
        check_swiglu,
        {"shape": (33, 200), "halves": True},
        more=({"limit": None, "use_ue8m0": False}, {"pad_scales": True}),
    ),
    Case(
        "gate_cast_to_fp8",
        gate,
        check_gate,
        {"shape": (33, 200), "halves": True},
        more=({"use_ue8m0": False}, {"pad_scales": True}),
    ),
    Case("per_block_cast_to_fp8", weight_cast, check_weight_cast, {"rows": 300, "columns": 200}),
    Case("dequantize_per_block", weight, check_weight, {"rows": 300, "columns": 200}),
    Case("fp8_gemm_nt", product, check_product, {"rows": 70, "columns": 392, "channels": 400}),
    Case(
        "grouped_fp8_gemm_nt",
        grouped,
        check_product,
        {**_EXPERTS, "columns": 136, "out_dtype": F32},
        more=({"tokens": 0, "weighted": False},),
        hostile={
            "ends": Hostile(
                other_experts,
                lambda ends: [(e,) for e in range(len(ends))],
                {"sizes": (10, 60, 0, 20), "columns": 136, "channels": 256, "weighted": False},
            ),
            **hostile_experts(**_PRODUCTS),
        },
    ),
    Case(
        "grouped_fp8_fp4_gemm_nt",
        partial(grouped, is_fp4=True),
        check_fp4_product,
        {**_EXPERTS, "channels": 416, "columns": 136, "out_dtype": F32},
        more=({"tokens": 0, "weighted": False},),
        hostile=hostile_experts(**_PRODUCTS),
    ),
    Case(
        "grouped_fp8_gemm_swiglu",
        experts_swiglu,
        check_experts_swiglu,
        _EXPERTS,
        hostile=hostile_experts(inner=128),
        more=({"pad_scales": True},),
    ),
    Case(
        "grouped_fp8_fp4_gemm_swiglu",
        partial(experts_swiglu, is_fp4=True),
        check_experts_swiglu,
        {**_EXPERTS, "channels": 416},
        more=({"tokens": 0, "limit": None, "use_ue8m0": True},),
        hostile=hostile_experts(inner=128),
    ),
    Case("fp4_block_scales", fp4_weight, check_block_scales, {"shape": (3, 260, 416)}),
    Case("widen_fp4", fp4_weight, check_widened, {"shape": (3, 260, 416)}),
    Case("linear_fp32", linear, check_linear, {"tokens": 33, "rows": 600, "channels": 2080}),
]
