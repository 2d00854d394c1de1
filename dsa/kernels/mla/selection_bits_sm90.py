"""Turn lists of selected keys into bit masks, one bit per key.

Key starts[t] + 128 b + 8 i + 2 c + j is bit 2 i + j of bits[t, 4 b + c], for i < 16, c < 4 and j < 2. starts[t] is the
first key that query t can select; without `starts` it is 0.

A word contains the bits that a lane of mha_varlen_fwd_sm90.py needs for one row (query) of scores and 128 keys: in a
wgmma accumulator the lane has columns 8 i + 2 c + j, with c = lane % 4.

Work: a CTA handles one query. It clears CHUNK words of shared memory, sets by atomicOr the bits of the selected keys
that these words cover, and writes the words to global memory. It repeats this for the next CHUNK words, and reads the
indices again, until all max_keys keys are covered.
Warp roles: none, all warps do the same. Shared memory: CHUNK words.
Launch: programmatic dependent launch.
Roofline: bound by memory, 4 bytes per index and one bit per key.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.kernels.mla.limits import SELECTION_KEYS, SELECTION_WORDS
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS = 256
CHUNK = 8192  # words, which cover 262144 keys
UNROLL = 4


class SelectionBitsSm90:
    @cute.jit
    def __call__(self, indices: cute.Tensor, starts: cute.Tensor | None, bits: cute.Tensor, max_keys: Int32, stream):
        self.kernel(indices, starts, bits, max_keys).launch(
            grid=(indices.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, indices: cute.Tensor, starts: cute.Tensor | None, bits: cute.Tensor, max_keys: Int32):
        tid, _, _ = cute.arch.thread_idx()
        t, _, _ = cute.arch.block_idx()
        words = SmemAllocator().allocate_tensor(Int32, cute.make_layout(CHUNK), byte_alignment=16)
        wait_for_prerequisite_grids()
        start = Int64(0)
        if const_expr(starts is not None):
            start = Int64(starts[t])
        for first in cutlass.range(0, bits.shape[1], CHUNK, unroll=1):
            count = cutlass.min(bits.shape[1] - first, CHUNK)
            for i in cutlass.range(tid, count, THREADS, unroll=1):
                words[i] = 0
            cute.arch.sync_threads()
            for i in cutlass.range(tid, indices.shape[1], THREADS, unroll=UNROLL):
                index = indices[t, i]
                key = Int64(index) - start
                word = Int32(key // SELECTION_KEYS) * SELECTION_WORDS + Int32(key % 8) // 2 - first
                if index >= 0 and key >= 0 and key < max_keys and word >= 0 and word < count:
                    bit = Int32(key % SELECTION_KEYS) // 8 * 2 + Int32(key % 2)
                    set_bits(words.iterator.toint() + word * 4, Int32(1) << bit)
            cute.arch.sync_threads()
            for i in cutlass.range(tid, count, THREADS, unroll=1):
                bits[t, first + i] = words[i]
            cute.arch.sync_threads()


@cute.jit
def set_bits(address: Int32, word: Int32):
    """Set the bits of `word` in a word of shared memory, atomically."""
    cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[Int32(address), word])


@cached
def compile_selection_bits(with_starts: bool):
    """Compile f(indices [T, k], starts [T] or None, bits [T, 4 * ceil(max_keys / 128)], max_keys), all int32.

    An index is ignored if it is negative, below starts[t], or at least starts[t] + max_keys. Rows of indices and of
    bits are contiguous; T, max_keys > 0.
    """
    queries = cute.sym_int()
    return compile_sm90(
        SelectionBitsSm90(),
        fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4),
        fake(Int32, (queries,), strides(1), 4) if with_starts else None,
        fake(Int32, (queries, cute.sym_int(divisibility=4)), (*strides(1, 4), 1), 16),
        *(Int32(1), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_selection_bits, (with_starts,)) for with_starts in (True, False)]
