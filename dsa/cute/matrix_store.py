"""8 x 8 matrices of 16-bit numbers from a warp's registers to shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr


@cute.jit
def pack(low: Float32, high: Float32, dtype: cutlass.Constexpr):
    """Two numbers rounded to `dtype`, bf16 or fp16, the first in the lower half."""
    kind = "bf16x2" if const_expr(dtype is BFloat16) else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


@cute.jit
def store_matrices(address: Int32, words):
    """Store 1, 2 or 4 matrices; lane 8 i + r gives the address of row r of matrix i. `words`: what a lane has of each,
    two neighbours of a row."""
    _store(address, words, "")


@cute.jit
def store_transposed(address: Int32, words):
    """The same, transposed: what a lane has of each are two neighbours of a column."""
    _store(address, words, ".trans")


@cute.jit
def _store(address: Int32, words, kind: cutlass.Constexpr):
    count = len(words)
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{count}{kind}.shared.b16 [{{$r0}}], " + "{" + registers + "};",
        read_only_args=[address, *words],
    )
