"""Queries of attention over an FP8 cache: from the stages of keys in which they come to their own memory.

What is multiplied with e4m3 keys is f16, divided by a power of two so that the largest is about 2^14. Which channels
the products' 16 of a step are is free, if keys and queries agree: they are in the order in which a lane reads a key's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import state_at
from dsa.cute.shared_memory import load_16, store_4
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_convert import larger_bf16, times_to_f16
from dsa.kernels.mla.fp8_kv_gather import Fp8KvPipeline, Fp8TopkGather
from dsa.kernels.mla.mla_tiles import K_CHUNK
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, Thread
from dsa.kernels.mla.swap_ab_score_loop import SwapAbScoreLoop
from dsa.kernels.mla.swap_ab_softmax import power_of_two

AHEAD = 2  # vectors of 16 bytes that are read before one is stored, which the compiler leaves in this order


class Fp8KvQueries(SwapAbScoreLoop):
    """`head_tile` heads of a query, 16, 32 or 64, and keys in `kv`."""

    def __init__(self, kv: Fp8TopkGather, head_tile: int):
        super().__init__(head_tile, kv.score_warpgroups, Float16, key_exponents=True)
        self.kv, self.head_dim, self.q_stages = kv, kv.head_dim, kv.q_stages
        # Chunks of 64 channels of a key that are e4m3; one more is bf16, and of 512 channels part of the value.
        self.fp8_chunks = self.head_dim // K_CHUNK - 1

    @cute.jit
    def load_q(
        self,
        operands,
        pipeline: Fp8KvPipeline,
        exchange: SwapAbExchange,
        ring,
        heads: HeadRange,
        thread: Thread,
    ) -> Float32:
        """A work tile's queries from the stages in which they came to their own memory, zeros behind the last
        head; of each chunk in the order in which lanes have the keys'. What is multiplied with e4m3 goes to f16,
        divided by a power of two, so that the largest is about 2^14. -> that power.

        Of two warpgroups each takes every other chunk."""
        raw, rows = operands.raw, heads.total - heads.first
        tid = opaque(thread.tid)
        row, m = tid >> 3, tid & 7
        chunks, count = self.fp8_chunks + 1, self.kv.score_warpgroups
        sources = []  # of the thread's 16 bytes of chunk 0, by row
        by_word = [Uint32(0)] * 4  # for a shorter chain of instructions
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            pipeline.kv.consumer_wait(state)
            for j in cutlass.range_constexpr(self.kv.q_rows // 16):
                source = raw + state.stage * self.kv.stage_bytes + (16 * j + row) * (2 * self.head_dim) + m * 16
                sources.append(source)
                if i * self.kv.q_rows + 16 * j + row < rows:
                    for n in cutlass.range_constexpr((chunks + count - 1) // count):
                        chunk = n * count + thread.side
                        if chunk < self.fp8_chunks:
                            words = load_16(source + 2 * K_CHUNK * chunk)
                            for k in cutlass.range_constexpr(4):
                                by_word[k] = larger_bf16(by_word[k], words[k])
        largest = larger_bf16(larger_bf16(by_word[0], by_word[1]), larger_bf16(by_word[2], by_word[3]))
        for log in cutlass.range_constexpr(5):
            largest = larger_bf16(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << log))
        if thread.lane == 0:
            exchange.q_largest[thread.side * 4 + thread.warp] = largest
        self.sync_score()
        for w in cutlass.range_constexpr(4 * count):
            largest = larger_bf16(largest, exchange.q_largest[w])
        exponent = Int32(cutlass.max(largest & 0x7FFF, (largest >> 16) & 0x7FFF)) >> 7
        exponent = cutlass.max(cutlass.min(exponent - 127 - 14, 100), -100)
        power, inverse = power_of_two(exponent), power_of_two(-exponent)
        vectors = [(j, n) for j in range(len(sources)) for n in range((chunks + count - 1) // count)]
        read = [self.read_q(sources, *vectors[k], thread) for k in range(min(AHEAD, len(vectors)))]
        for k, (j, n) in enumerate(vectors):
            words, own, chunk = read[k], 16 * j + row, n * count + thread.side
            if const_expr(k + AHEAD < len(vectors)):
                read.append(self.read_q(sources, *vectors[k + AHEAD], thread))
            target = Int32(exchange.q.iterator.toint()) + 2 * K_CHUNK * own
            # Step s of 16 channels has vectors 2 s and 2 s + 1; of a vector, lane t of a quad of lanes multiplies word
            # t. A lane reads of e4m3 channels 16 t to 16 t + 15, four of each of four steps; of bf16 channels 8 t to 8
            # t + 7 of 32, four of each of two steps.
            vector, word = (m & 1) << 2, m >> 1
            if chunk == self.fp8_chunks:
                vector, word = m & 4, m & 3
            if chunk < chunks:
                for pair in cutlass.range_constexpr(4):
                    number = words[pair]
                    if chunk < self.fp8_chunks:
                        number = times_to_f16(number, inverse, inverse)
                    if own >= rows:
                        number = Uint32(0)
                    place = 2 * K_CHUNK * self.head_tile * chunk + 16 * ((vector + pair) ^ (own & 7)) + 4 * word
                    store_4(target + place, number)
        self.sync_score()
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            if thread.side == 0:
                pipeline.kv.consumer_release(state)
        return power

    def read_q(self, sources: list, j: int, n: int, thread: Thread) -> list:
        """The thread's 16 bytes of its n-th chunk of a row. Of a chunk that the row does not have, what lies there."""
        return [*load_16(sources[j] + 2 * K_CHUNK * (n * self.kv.score_warpgroups + thread.side))]
