"""Q for attention over an FP8 cache: from the key stages in which it arrives to its own memory.

The part of Q that multiplies e4m3 keys is stored as f16, divided by a power of two so that its largest
magnitude is about 2^14. The order of channels in a wgmma step of 16 is free, as long as keys and Q agree. Q
is stored in the order in which a lane reads a key's channels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32, const_expr

from dsa.cute.pipeline import state_at
from dsa.cute.shared_memory import load_16, store_matrices
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_convert import larger_bf16, times_to_f16
from dsa.kernels.mla.fp8_kv_gather import Fp8KvPipeline, Fp8TopkGather
from dsa.kernels.mla.mla_tiles import K_CHUNK
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, Thread
from dsa.kernels.mla.swap_ab_score_loop import SwapAbScoreLoop
from dsa.kernels.mla.swap_ab_softmax import power_of_two

AHEAD = 1  # loads in flight ahead of the stores; the compiler keeps this order


class Fp8KvQueries(SwapAbScoreLoop):
    """Q of `head_tile` heads of a query, 16, 32 or 64, for keys in `kv`."""

    def __init__(self, kv: Fp8TopkGather, head_tile: int):
        super().__init__(head_tile, kv.score_warpgroups, Float16, key_exponents=True)
        self.kv, self.head_dim, self.q_stages = kv, kv.head_dim, kv.q_stages
        # e4m3 chunks of 64 channels per key. One more chunk is bf16; for 512 channels it is part of the
        # value.
        self.fp8_chunks = self.head_dim // K_CHUNK - 1
        # How a warpgroup's four warps share Q: octets of heads at a time, warps per octet, distance between a
        # warp's chunks, chunks per warp.
        self.octets = min(head_tile // 8, 4)
        self.sharers = 4 // self.octets
        self.stride = kv.score_warpgroups * self.sharers
        self.turns = -(-(self.fp8_chunks + 1) // self.stride)

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
        """Copy a work tile's Q from its stages to its own memory, with zeros after the last head.

        Each chunk is stored in the order in which lanes read the keys' channels. The part that multiplies
        e4m3 keys is converted to f16, divided by a power of two so that its largest magnitude is about 2^14.
        Return that power of two.

        A warp handles eight heads at a time, with four lanes per head. Word i of all lanes is an 8 x 8 matrix
        for stmatrix. Two warpgroups take alternate chunks, as do two warps with the same heads.
        """
        rows, lane = heads.total - heads.first, opaque(thread.lane)
        chunk = thread.side * self.sharers + thread.warp // self.octets
        first = thread.warp % self.octets * 8  # first of the warp's heads; the next eight are 32 further
        own, sources = first + (lane >> 2), []
        by_word = [Uint32(0)] * 4  # four running maxima, for a shorter dependency chain
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            pipeline.kv.consumer_wait(state)
            sources.append(operands.raw + state.stage * self.kv.stage_bytes + own * self.kv.q_pitch)
            if 32 * i + own < rows:
                for n in cutlass.range_constexpr(self.turns):
                    if n * self.stride + chunk < self.fp8_chunks:
                        words = self.read_q(sources[i], n * self.stride + chunk, lane)
                        for k in cutlass.range_constexpr(8):
                            by_word[k % 4] = larger_bf16(by_word[k % 4], words[k])
        largest = larger_bf16(larger_bf16(by_word[0], by_word[1]), larger_bf16(by_word[2], by_word[3]))
        for log in cutlass.range_constexpr(5):
            largest = larger_bf16(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << log))
        if thread.lane == 0:
            exchange.q_largest[thread.side * 4 + thread.warp] = largest
        self.sync_score()
        for w in cutlass.range_constexpr(4 * self.kv.score_warpgroups):
            largest = larger_bf16(largest, exchange.q_largest[w])
        exponent = Int32(cutlass.max(largest & 0x7FFF, (largest >> 16) & 0x7FFF)) >> 7
        exponent = cutlass.max(cutlass.min(exponent - 127 - 14, 100), -100)
        power, inverse = power_of_two(exponent), power_of_two(-exponent)
        # Lane 8 i + r addresses row r of matrix i: vector i of that head's 128 bytes of a chunk.
        row = lane & 7
        target = Int32(exchange.q.iterator.toint()) + 2 * K_CHUNK * (first + row) + 16 * ((lane >> 3) ^ row)
        parts = [(i, n) for i in range(self.kv.q_stages) for n in range(self.turns)]
        read = [self.read_q(sources[i], n * self.stride + chunk, lane) for i, n in parts[:AHEAD]]
        for k, (i, n) in enumerate(parts):
            words, of_chunk = read[k], n * self.stride + chunk
            if const_expr(k + AHEAD < len(parts)):
                ahead = parts[k + AHEAD]
                read.append(self.read_q(sources[ahead[0]], ahead[1] * self.stride + chunk, lane))
            if of_chunk <= self.fp8_chunks:
                numbers = []
                for word in words:
                    number = word
                    if of_chunk < self.fp8_chunks:
                        number = times_to_f16(word, inverse, inverse)
                    if 32 * i + own >= rows:
                        number = Uint32(0)
                    numbers.append(number)
                place = target + 2 * K_CHUNK * (self.head_tile * of_chunk + 32 * i)
                store_matrices(place, numbers[:4])
                store_matrices(place ^ 64, numbers[4:])
        self.sync_score()
        for i in cutlass.range_constexpr(self.kv.q_stages):
            state = state_at(ring + i, self.kv.stages)
            if thread.side == 0:
                pipeline.kv.consumer_release(state)
        return power

    @cute.jit
    def read_q(self, source, chunk, lane):
        """Return a lane's 8 words of a chunk of a head. Vector v of the wgmma operand is word v of the head's
        four lanes.

        With t = lane % 4, these are channels 16 t to 16 t + 15 of an e4m3 chunk, and channels 8 t to 8 t + 7
        of each half of the bf16 chunk. For a chunk past the last one the words are garbage.
        """
        of_bf16 = chunk == self.fp8_chunks
        start = source + 2 * K_CHUNK * chunk + (lane & 3) * (Int32(16) if of_bf16 else Int32(32))
        return [*load_16(start), *load_16(start + (Int32(64) if of_bf16 else Int32(16)))]
