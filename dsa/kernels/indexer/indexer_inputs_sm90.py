"""The indexer's queries and keys from their projections to FP8: norm (keys), RoPE, Hadamard, quantisation, store.

Plan
- 8 lanes process a vector of 128 channels, with 16 consecutive channels per lane. The channels stay in registers from
  the load to the store: the projection is read once, and one byte per channel is written.
- LayerNorm is two shuffle trees (mean, then the centred square). RoPE on neighbouring pairs stays within a lane. RoPE
  on halves exchanges with the lane R / 32 away. Each step rounds to the projection's type, as separate operations
  would.
- Queries: a vector is a head of a token, and its scale multiplies the head's weight. Keys: a vector is a token. It is
  written to the page of its slot, whose values come first and whose scales follow. A slot outside the cache is skipped.
Shared memory: none. Constraints: 128 channels, R of 32, 64 or 128, rows at multiples of 16 bytes.
Roofline: memory, 3 bytes per channel (bf16). But about 32 instructions per channel fill the issue slots first: 57% of
the copy bandwidth for long inputs. Keys are few, so their cost is that of a launch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.indexer_page import find_slot, page_planes
from dsa.cute.quantize import GROUP, hadamard, quantize, round_to
from dsa.cute.rounded import multiply_rounded, rotate_pair
from dsa.kernels.indexer.limits import INPUT_DTYPES, ROTATED
from dsa.runtime.compile_cache import cached, compile_sm90

CHANNELS = 16
LANES = GROUP // CHANNELS
THREADS = 256
VECTORS = THREADS // LANES


class Rope(NamedTuple):
    """rotated: R. interleaved: whether neighbouring channels form a pair, or else channels R / 2 apart. last: whether
    the last R channels are rotated, or else the first."""

    rotated: int
    interleaved: bool
    last: bool


@cute.jit
def _rotate(v: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, lane: Int32, rope: cutlass.Constexpr[Rope]):
    """Rotate this lane's channels v by the token's angles."""
    rotated, interleaved, last = rope
    span = rotated // CHANNELS  # lanes that hold rotated channels
    place = lane - (LANES - span if last else 0)
    inside = place >= 0 and place < span
    angles = CHANNELS // 2 if interleaved else CHANNELS
    at = place if interleaved else place % max(span // 2, 1)
    if not inside:
        at = Int32(0)
    c, s = cute.make_rmem_tensor((angles,), Float32), cute.make_rmem_tensor((angles,), Float32)
    cute.autovec_copy(cute.local_tile(cos, (angles,), (at,)), c)
    cute.autovec_copy(cute.local_tile(sin, (angles,), (at,)), s)
    if const_expr(interleaved):
        if inside:
            for i in cutlass.range_constexpr(angles):
                a, b = v[2 * i], v[2 * i + 1]
                v[2 * i], v[2 * i + 1] = rotate_pair(a, b, c[i], s[i])
    else:
        for i in cutlass.range_constexpr(CHANNELS):
            other = cute.arch.shuffle_sync_bfly(v[i], offset=span // 2)
            if inside:
                turned = multiply_rounded(other, s[i])
                if place < span // 2:
                    turned = -turned
                v[i] = multiply_rounded(v[i], c[i]) + turned


class QuantizeIndexerQueriesSm90:
    def __init__(self, rope: Rope, use_ue8m0: bool):
        self.rope, self.use_ue8m0 = rope, use_ue8m0

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        weights: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q8: cute.Tensor,
        scaled: cute.Tensor,
        stream,
    ):
        heads = q.shape[1]
        total = q.shape[0] * heads
        divisor = cute.fast_divmod_create_divisor_v2(heads)
        self.kernel(q, weights, cos, sin, q8, scaled, divisor, total).launch(
            grid=(cute.ceil_div(total, VECTORS), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        weights: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q8: cute.Tensor,
        scaled: cute.Tensor,
        heads: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid % LANES
        vector = block * VECTORS + tid // LANES
        wait_for_prerequisite_grids()
        # Vectors past the end read the last vector and store nothing.
        t, h = divmod(cutlass.min(vector, total - 1), heads)
        raw = cute.make_rmem_tensor((CHANNELS,), q.element_type)
        cute.autovec_copy(cute.local_tile(q[t, h, None], (CHANNELS,), (lane,)), raw)
        v = cute.make_rmem_tensor((CHANNELS,), Float32)
        v.store(raw.load().to(Float32))
        _rotate(v, cos[t, None], sin[t, None], lane, self.rope)
        round_to(v, q.element_type)
        hadamard(v, lane, CHANNELS)
        round_to(v, q.element_type)
        scale = quantize(v, CHANNELS, self.use_ue8m0)
        out = cute.make_rmem_tensor((CHANNELS,), Float8E4M3FN)
        out.store(v.load().to(Float8E4M3FN))
        if vector < total:
            cute.autovec_copy(out, cute.local_tile(q8[t, h, None], (CHANNELS,), (lane,)))
            if lane == 0:
                scaled[t, h] = weights[t, h] * scale


class WriteIndexerKeysSm90:
    def __init__(self, rope: Rope, use_ue8m0: bool):
        self.rope, self.use_ue8m0 = rope, use_ue8m0

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        page_size: Int32,
        eps: Float32,
        stream,
    ):
        divisor = cute.fast_divmod_create_divisor_v2(page_size)
        self.kernel(k, weight, bias, cos, sin, cache, slots, divisor, page_size, eps).launch(
            grid=(cute.ceil_div(k.shape[0], VECTORS), 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        cache: cute.Tensor,
        slots: cute.Tensor,
        divisor: cute.FastDivmodDivisorV2,
        page_size: Int32,
        eps: Float32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = tid % LANES
        vector = block * VECTORS + tid // LANES
        wait_for_prerequisite_grids()
        t = cutlass.min(vector, k.shape[0] - 1)
        raw = cute.make_rmem_tensor((CHANNELS,), k.element_type)
        w, b = cute.make_rmem_tensor((CHANNELS,), Float32), cute.make_rmem_tensor((CHANNELS,), Float32)
        cute.autovec_copy(cute.local_tile(k[t, None], (CHANNELS,), (lane,)), raw)
        cute.autovec_copy(cute.local_tile(weight, (CHANNELS,), (lane,)), w)
        cute.autovec_copy(cute.local_tile(bias, (CHANNELS,), (lane,)), b)
        v = cute.make_rmem_tensor((CHANNELS,), Float32)
        v.store(raw.load().to(Float32))
        mean = self.group_sum(v) * Float32(1 / GROUP)
        square = cute.make_rmem_tensor((CHANNELS,), Float32)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] - mean
            square[i] = v[i] * v[i]
        inverse = cute.math.rsqrt(self.group_sum(square) * Float32(1 / GROUP) + eps)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] * inverse * w[i] + b[i]
        round_to(v, k.element_type)
        _rotate(v, cos[t, None], sin[t, None], lane, self.rope)
        round_to(v, k.element_type)
        hadamard(v, lane, CHANNELS)
        round_to(v, k.element_type)
        scale = quantize(v, CHANNELS, self.use_ue8m0)
        out = cute.make_rmem_tensor((CHANNELS,), Float8E4M3FN)
        out.store(v.load().to(Float8E4M3FN))
        exists, page, offset = find_slot(cache, slots[t], page_size, divisor)
        if exists and vector < k.shape[0]:
            values, scales = page_planes(cache, page, page_size, GROUP, Float8E4M3FN)
            cute.autovec_copy(out, cute.local_tile(values[offset, None], (CHANNELS,), (lane,)))
            if lane == 0:
                scales[offset] = scale

    @cute.jit
    def group_sum(self, v: cute.Tensor) -> Float32:
        total = Float32(0.0)
        for i in cutlass.range_constexpr(CHANNELS):
            total += v[i]
        for log in cutlass.range_constexpr(LANES.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << log)
        return total


def _angles(tokens, rotated: int):
    return fake(Float32, (tokens, rotated // 2), (*strides(1, 4), 1))


@cached
def compile_quantize_indexer_queries(dtype: str, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool):
    """-> f(q [T, H, 128] dtype, weights [T, H] fp32, cos, sin [T, R / 2] fp32, q8 [T, H, 128] e4m3, scaled [T, H]);
    T * H > 0. Rows of q, cos and sin start at multiples of 16 bytes."""
    element = cute_dtype(dtype)
    aligned = 128 // element.width
    tokens, heads = cute.sym_int(), cute.sym_int()
    q = fake(
        element,
        (tokens, heads, GROUP),
        (*strides(2, aligned), 1),
    )
    weights = fake(Float32, (tokens, heads), (*strides(1), 1), 4)
    angles = [_angles(tokens, rotated) for _ in range(2)]
    q8 = fake(Float8E4M3FN, (tokens, heads, GROUP), (*strides(1, GROUP), GROUP, 1))
    scaled = fake(Float32, (tokens, heads), (*strides(1), 1), 4)
    kernel = QuantizeIndexerQueriesSm90(Rope(rotated, interleaved, last), use_ue8m0)
    return compile_sm90(kernel, q, weights, *angles, q8, scaled, fake_stream())


@cached
def compile_write_indexer_keys(
    dtype: str, slot_dtype: str, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool
):
    """-> f(k [T, 128] dtype, weight [128], bias [128] fp32, cos, sin [T, R / 2] fp32, cache [pages, bytes] uint8,
    slots [T], page_size, eps); T, pages > 0. Rows and pages start at multiples of 16 bytes."""
    element = cute_dtype(dtype)
    tokens = cute.sym_int()
    k = fake(element, (tokens, GROUP), (*strides(1, 128 // element.width), 1))
    affine = [fake(Float32, (GROUP,), (1,)) for _ in range(2)]
    angles = [_angles(tokens, rotated) for _ in range(2)]
    cache = fake(cutlass.Uint8, (cute.sym_int(), cute.sym_int()), (*strides(1, 16), 1))
    slots = fake(cute_dtype(slot_dtype), (tokens,), (1,), 4)
    kernel = WriteIndexerKeysSm90(Rope(rotated, interleaved, last), use_ue8m0)
    return compile_sm90(kernel, k, *affine, *angles, cache, slots, Int32(1), Float32(0.0), fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the ops can ask for."""
    options = [
        (rotated, interleaved, last, use_ue8m0)
        for rotated in ROTATED
        for interleaved in (True, False)
        for last in (True, False)
        for use_ue8m0 in (True, False)
    ]
    return [(compile_quantize_indexer_queries, (dtype, *o)) for dtype in INPUT_DTYPES for o in options] + [
        (compile_write_indexer_keys, (dtype, slots, *o))
        for dtype in INPUT_DTYPES
        for slots in ("int32", "int64")
        for o in options
    ]
