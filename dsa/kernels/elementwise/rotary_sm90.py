"""Rotary position embedding (RoPE) of queries or keys, out of place or in place.

Plan
- A row has D channels, of which R are rotated. A group is 2P channels of a row, where P is 4 or 1. A group of rotated
  channels is P pairs. If the channels of a pair are adjacent (interleaved), the group is one vector of 2P channels; if
  the channels of a pair are R / 2 apart (halves), the group is two vectors of P channels. A group is in one thread's
  registers from the load to the store, so a row can be rotated in place.
- The row's other channels are copied in groups of the same size. `begin` (the number of groups before the rotated
  groups) and the number of angles determine which groups are rotated. A division with precomputed numbers gives a
  group's row, and offsets have 64 bits.
- Products are rounded before they are added, as in the reference, so the bits are equal.
- P is 4 if D and R are multiples of 8 and all rows start at multiples of 16 bytes: a group is then 16 bytes of x
  (bf16), of cos and of sin. Otherwise P is 1, which works with any alignment. A thread has `groups` groups and issues
  all loads of x first. Cosines and sines come from L2 or L1, because all heads of a token share them.
Shared memory: none. Constraints: D even, last dimensions contiguous.
Roofline: bound by memory, 2 D elements per row. About 5 instructions per rotated channel. With few tokens, bound by the
latency of a launch and one round trip to memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_rows, fake_stream
from dsa.cute.registers import converted, loaded
from dsa.cute.rounded import rotate_pair
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.elementwise.limits import DTYPES, ROTARY_PAIRS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

LONG_INPUT = 1 << 24  # from this many elements of 16 bits on, a thread has two groups if P is 4


@dataclass(frozen=True)
class RotaryConfig:
    """pairs: P, the pairs per group. groups: groups per thread. threads: threads per CTA."""

    pairs: int = ROTARY_PAIRS
    groups: int = 1
    threads: int = 128


class ApplyRotarySm90:
    def __init__(self, interleaved: bool, config: RotaryConfig):
        self.interleaved = interleaved
        self.pairs, self.groups, self.threads = config.pairs, config.groups, config.threads
        # Vectors per group: one with both channels of each pair, or one per half.
        self.vectors, self.width = (1, 2 * self.pairs) if interleaved else (2, self.pairs)

    @cute.jit
    def __call__(self, x: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, out: cute.Tensor, begin: Int32, stream):
        groups_of_row = x.shape[2] // (2 * self.pairs)
        total = x.shape[0] * x.shape[1] * groups_of_row
        row_groups = cute.fast_divmod_create_divisor_v2(groups_of_row)
        heads = cute.fast_divmod_create_divisor_v2(x.shape[1])
        self.kernel(x, cos, sin, out, begin, row_groups, heads, total).launch(
            grid=(cute.ceil_div(total, self.threads * self.groups), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        out: cute.Tensor,
        begin: Int32,
        row_groups: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
        total: Int32,
    ):
        tid, block = thread_and_cta()
        first = block * (self.threads * self.groups) + tid
        rotated_groups = cos.shape[1] // self.pairs
        wait_for_prerequisite_grids()
        raw = cute.make_rmem_tensor((self.width, self.vectors, self.groups), x.element_type)
        places = [None] * self.groups
        for u in cutlass.range_constexpr(self.groups):
            row, group = divmod(cutlass.min(first + u * self.threads, total - 1), row_groups)
            t, h = divmod(row, heads)
            group -= begin
            rotates = group >= 0 and group < rotated_groups
            at = self.vectors_of(group, rotates, begin, rotated_groups)
            places[u] = t, h, group, rotates, at
            for n in cutlass.range_constexpr(self.vectors):
                source = cute.local_tile(x[t, h, None], (self.width,), (at[n],))
                cute.autovec_copy(source, raw[None, n, u])
        for u in cutlass.range_constexpr(self.groups):
            t, h, group, rotates, at = places[u]
            if rotates:
                self.rotate(raw[None, None, u], cos[t, None], sin[t, None], group)
            if first + u * self.threads < total:
                for n in cutlass.range_constexpr(self.vectors):
                    target = cute.local_tile(out[t, h, None], (self.width,), (at[n],))
                    cute.autovec_copy(raw[None, n, u], target)

    @cute.jit
    def vectors_of(self, group: Int32, rotates: cutlass.Boolean, begin: Int32, rotated_groups: Int32):
        """Return the indices of a group's vectors in the row. group: the group's index relative to the first rotated
        group; negative before it."""
        if const_expr(self.interleaved):
            return (begin + group,)
        at, apart = 2 * (begin + group), Int32(1)
        if rotates:
            at, apart = 2 * begin + group, rotated_groups
        return at, at + apart

    @cute.jit
    def rotate(self, raw: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, group: Int32):
        c, s = [loaded(cute.local_tile(angles, (self.pairs,), (group,))) for angles in (cos, sin)]
        v = converted(raw, Float32)
        for i in cutlass.range_constexpr(self.pairs):
            one = (2 * i, 0) if self.interleaved else (i, 0)
            two = (2 * i + 1, 0) if self.interleaved else (i, 1)
            v[one], v[two] = rotate_pair(v[one], v[two], c[i], s[i])
        raw.store(v.load().to(raw.element_type))


@cached
def compile_apply_rotary(dtype: str, interleaved: bool, config: RotaryConfig):
    """-> f(x [T, H, D] dtype, cos, sin [T, R / 2] fp32, out [T, H, D], begin); T * H > 0, R from 2 to D, D even.

    begin: number of groups of 2P channels before the rotated channels. out may be x. T * H * D / 2P plus a CTA's groups
    must be below 2^31. If P is 4, D and R must be multiples of 8, and all rows must start at multiples of 16 bytes.
    """
    element = cute_dtype(dtype)
    tokens, heads = cute.sym_int(), cute.sym_int()
    dim, half = cute.sym_int(divisibility=2 * config.pairs), cute.sym_int(divisibility=config.pairs)

    x_align, angle_align = (16, 16) if config.pairs == ROTARY_PAIRS else (element.width // 8, 4)
    x, out = (fake_rows(element, tokens, heads, dim, align=x_align) for _ in range(2))
    cos, sin = (fake_rows(Float32, tokens, half, align=angle_align) for _ in range(2))
    return compile_sm90(ApplyRotarySm90(interleaved, config), x, cos, sin, out, Int32(0), fake_stream())


def choose_config(dtype: str, wide: bool, elements: int) -> RotaryConfig:
    """Short inputs need many CTAs, so a thread has one group. With long 16-bit inputs and P = 4 a thread has two
    groups, so that 32 bytes of loads are in flight. wide: whether D, R and the alignment of rows allow P = 4."""
    if not wide:
        return RotaryConfig(pairs=1)
    return RotaryConfig(groups=2 if dtype != "float32" and elements >= LONG_INPUT else 1)


def shipped_variants() -> Variants:
    return [
        (compile_apply_rotary, (dtype, interleaved, config))
        for dtype in DTYPES
        for interleaved in (True, False)
        for config in sorted({choose_config(dtype, w, n) for w in (True, False) for n in (1, LONG_INPUT)}, key=str)
    ]
