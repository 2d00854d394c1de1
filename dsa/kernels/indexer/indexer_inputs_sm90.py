"""Conversion of the indexer's projected queries and keys to FP8: norm (keys only), RoPE, Hadamard transform,
quantisation, store.

Plan
- 8 lanes process a vector of 128 channels, with 16 consecutive channels per lane. The channels stay in registers from
  the load to the store: the projection is read once, and one byte per channel is written.
- LayerNorm takes two shuffle trees: one for the mean, one for the mean of the centred squares. RoPE rotates R channels.
  On interleaved pairs (adjacent channels) it stays within a lane. On halves (pairs of channels R / 2 apart) a lane
  exchanges with the lane R / 32 away. Norm, RoPE and Hadamard transform each round to the projection's dtype, as
  separate ops would.
- There are two kernels. Queries: a vector is one head of a token's query, and its scale multiplies the head's weight.
  Keys: a vector is a token's key. The kernel writes the key to the token's slot in the cache, unless the slot is
  outside the cache. A page has the values of all keys first, then the scales.
Shared memory: none. Constraints: 128 channels, R of 32, 64 or 128, rows at multiples of 16 bytes.
Roofline: 3 bytes per channel (bf16) are read and written. But the kernel of queries is bound by the issue slots: about
32 thread instructions per channel limit it to 57% of the copy bandwidth for long inputs. A token has one key but many
query heads, so the kernel of keys costs little more than a launch.
"""

from collections.abc import Callable
from typing import Any

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

CHANNELS = 16  # per lane
LANES = GROUP // CHANNELS  # per vector
THREADS = 256
VECTORS = THREADS // LANES  # per CTA


class IndexerInputs:
    """Base class of the kernels of queries and of keys.

    rotated      R, the number of channels that RoPE rotates
    interleaved  whether RoPE rotates pairs of adjacent channels; otherwise it rotates pairs of channels R / 2 apart
    last         whether RoPE rotates the last R channels; otherwise it rotates the first R
    use_ue8m0    whether scales are rounded up to powers of two
    """

    def __init__(self, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool):
        self.rotated, self.interleaved, self.last, self.use_ue8m0 = rotated, interleaved, last, use_ue8m0

    @cute.jit
    def lane_and_vector(self):
        """-> (this thread's index among the LANES lanes that share a vector, the vector's index)"""
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        return tid % LANES, block * VECTORS + tid // LANES

    @cute.jit
    def load(self, row: cute.Tensor, lane: Int32) -> cute.Tensor:
        raw = cute.make_rmem_tensor((CHANNELS,), row.element_type)
        cute.autovec_copy(cute.local_tile(row, (CHANNELS,), (lane,)), raw)
        v = cute.make_rmem_tensor((CHANNELS,), Float32)
        v.store(raw.load().to(Float32))
        return v

    @cute.jit
    def rotate(self, v: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, lane: Int32):
        """Apply RoPE to this lane's channels v. cos, sin [R / 2]: those of the token."""
        span = self.rotated // CHANNELS  # number of lanes with rotated channels
        place = lane - (LANES - span if self.last else 0)
        inside = place >= 0 and place < span
        angles = CHANNELS // 2 if self.interleaved else CHANNELS
        at = place if self.interleaved else place % max(span // 2, 1)
        if not inside:
            at = Int32(0)
        c, s = cute.make_rmem_tensor((angles,), Float32), cute.make_rmem_tensor((angles,), Float32)
        cute.autovec_copy(cute.local_tile(cos, (angles,), (at,)), c)
        cute.autovec_copy(cute.local_tile(sin, (angles,), (at,)), s)
        if const_expr(self.interleaved):
            if inside:
                for i in cutlass.range_constexpr(angles):
                    a, b = v[2 * i], v[2 * i + 1]
                    v[2 * i], v[2 * i + 1] = rotate_pair(a, b, c[i], s[i])
        else:
            for i in cutlass.range_constexpr(CHANNELS):
                other = cute.arch.shuffle_sync_bfly(v[i], offset=span // 2)
                if inside:
                    rotated = multiply_rounded(other, s[i])
                    if place < span // 2:
                        rotated = -rotated
                    v[i] = multiply_rounded(v[i], c[i]) + rotated

    @cute.jit
    def rotate_and_quantize(self, v, cos, sin, lane, dtype: cutlass.Constexpr):
        """Apply RoPE and the Hadamard transform, each rounded to `dtype`, and quantise. -> (this lane's channels in
        FP8, the vector's scale)"""
        self.rotate(v, cos, sin, lane)
        round_to(v, dtype)
        hadamard(v, lane, CHANNELS)
        round_to(v, dtype)
        scale = quantize(v, CHANNELS, self.use_ue8m0)
        out = cute.make_rmem_tensor((CHANNELS,), Float8E4M3FN)
        out.store(v.load().to(Float8E4M3FN))
        return out, scale


class QuantizeIndexerQueriesSm90(IndexerInputs):
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
        lane, vector = self.lane_and_vector()
        wait_for_prerequisite_grids()
        # Vectors past the end read the last vector and store nothing.
        t, h = divmod(cutlass.min(vector, total - 1), heads)
        v = self.load(q[t, h, None], lane)
        out, scale = self.rotate_and_quantize(v, cos[t, None], sin[t, None], lane, q.element_type)
        if vector < total:
            cute.autovec_copy(out, cute.local_tile(q8[t, h, None], (CHANNELS,), (lane,)))
            if lane == 0:
                scaled[t, h] = weights[t, h] * scale


class WriteIndexerKeysSm90(IndexerInputs):
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
        lane, vector = self.lane_and_vector()
        wait_for_prerequisite_grids()
        t = cutlass.min(vector, k.shape[0] - 1)
        v, w, b = (self.load(row, lane) for row in (k[t, None], weight, bias))
        mean = self.group_sum(v) * Float32(1 / GROUP)
        square = cute.make_rmem_tensor((CHANNELS,), Float32)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] - mean
            square[i] = v[i] * v[i]
        inverse = cute.math.rsqrt(self.group_sum(square) * Float32(1 / GROUP) + eps)
        for i in cutlass.range_constexpr(CHANNELS):
            v[i] = v[i] * inverse * w[i] + b[i]
        round_to(v, k.element_type)
        out, scale = self.rotate_and_quantize(v, cos[t, None], sin[t, None], lane, k.element_type)
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


def _fake_angles(tokens, rotated: int) -> list[cute.Tensor]:
    return [fake(Float32, (tokens, rotated // 2), (*strides(1, 4), 1)) for _ in range(2)]


@cached
def compile_quantize_indexer_queries(dtype: str, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool):
    """-> f(q [T, H, 128] dtype, weights [T, H] fp32, cos, sin [T, R / 2] fp32, q8 [T, H, 128] e4m3, scaled [T, H]
    fp32), which writes q8 and scaled (weights times scales); T * H > 0. Rows of q, cos and sin start at multiples of 16
    bytes."""
    element = cute_dtype(dtype)
    tokens, heads = cute.sym_int(), cute.sym_int()
    q = fake(element, (tokens, heads, GROUP), (*strides(2, 128 // element.width), 1))
    weights, scaled = (fake(Float32, (tokens, heads), (*strides(1), 1), 4) for _ in range(2))
    q8 = fake(Float8E4M3FN, (tokens, heads, GROUP), (*strides(1, GROUP), GROUP, 1))
    return compile_sm90(
        QuantizeIndexerQueriesSm90(rotated, interleaved, last, use_ue8m0),
        *(q, weights, *_fake_angles(tokens, rotated), q8, scaled, fake_stream()),
    )


@cached
def compile_write_indexer_keys(
    dtype: str, slot_dtype: str, rotated: int, interleaved: bool, last: bool, use_ue8m0: bool
):
    """-> f(k [T, 128] dtype, weight [128], bias [128] fp32, cos, sin [T, R / 2] fp32, cache [pages, bytes] uint8, slots
    [T] slot_dtype, page_size, eps), which writes the converted keys to the cache; T, pages > 0. Pages and the rows of
    k, cos and sin start at multiples of 16 bytes."""
    element = cute_dtype(dtype)
    tokens = cute.sym_int()
    k = fake(element, (tokens, GROUP), (*strides(1, 128 // element.width), 1))
    affine = [fake(Float32, (GROUP,), (1,)) for _ in range(2)]
    cache = fake(cutlass.Uint8, (cute.sym_int(), cute.sym_int()), (*strides(1, 16), 1))
    slots = fake(cute_dtype(slot_dtype), (tokens,), (1,), 4)
    return compile_sm90(
        WriteIndexerKeysSm90(rotated, interleaved, last, use_ue8m0),
        *(k, *affine, *_fake_angles(tokens, rotated), cache, slots, Int32(1), Float32(0.0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the ops can ask for."""
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
