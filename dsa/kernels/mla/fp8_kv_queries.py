"""Queries of attention over an FP8 cache: from the slots of keys in which they come to their own memory.

What is multiplied with bytes is f16, divided by a power of two so that the largest is about 2^14. Which channels the
products' 16 of a step are is free, if keys and queries agree: they are in the order in which a lane reads a key's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32

from dsa.cute.shared_memory import load_16, store_4
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_rows import larger_bf16, times_to_f16
from dsa.kernels.mla.fp8_kv_tiles import ByteRings, ByteTiles
from dsa.kernels.mla.mla_tiles import CHUNK
from dsa.kernels.mla.swap_ab_exchange import Exchange, Thread
from dsa.kernels.mla.swap_ab_softmax import ColumnSoftmax, power_of_two


class ByteQueries(ColumnSoftmax):
    """`rows` heads of a query, 16, 32 or 64, and keys in `memory`."""

    def __init__(self, memory: ByteTiles, rows: int):
        super().__init__(rows, memory.scorers, Float16, powers=True)
        self.memory, self.channels = memory, memory.channels
        # Blocks of 64 channels of a key that are bytes; one more is bf16, and of 512 channels part of the value.
        self.byte_blocks = self.channels // CHUNK - 1

    @cute.jit
    def take_queries(self, raw, rings: ByteRings, exchange: Exchange, ring, rows, thread: Thread):
        """A piece's queries from the slots in which they came to their own memory, zeros behind the last of `rows`; of
        each block of 64 channels in the order in which lanes have the keys'. What is multiplied with bytes goes to f16,
        divided by a power of two, so that the largest is about 2^14. -> that power.

        Of two warpgroups each takes every other block."""
        tid = opaque(thread.tid)
        row, m = tid >> 3, tid & 7
        blocks, count, largest = self.byte_blocks + 1, self.memory.scorers, Uint32(0)
        for i in cutlass.range_constexpr(self.memory.query_slots):
            at, at_phase = self.memory.position(ring + i)
            cute.arch.mbarrier_wait(rings.full + at, at_phase)
            for j in cutlass.range_constexpr(self.memory.query_rows // 16):
                source = raw + at * self.memory.slot_bytes + (16 * j + row) * (2 * self.channels) + m * 16
                if i * self.memory.query_rows + 16 * j + row < rows:
                    for n in cutlass.range_constexpr((blocks + count - 1) // count):
                        block = n * count + thread.side
                        if block < self.byte_blocks:
                            for word in load_16(source + 2 * CHUNK * block):
                                largest = larger_bf16(largest, word)
        for log in cutlass.range_constexpr(5):
            largest = larger_bf16(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << log))
        if thread.lane == 0:
            exchange.largest[thread.side * 4 + thread.warp] = largest
        self.meet_all()
        for w in cutlass.range_constexpr(4 * count):
            largest = larger_bf16(largest, exchange.largest[w])
        exponent = Int32(cutlass.max(largest & 0x7FFF, (largest >> 16) & 0x7FFF)) >> 7
        exponent = cutlass.max(cutlass.min(exponent - 127 - 14, 100), -100)
        power, inverse = power_of_two(exponent), power_of_two(-exponent)
        for i in cutlass.range_constexpr(self.memory.query_slots):
            slot, _ = self.memory.position(ring + i)
            for j in cutlass.range_constexpr(self.memory.query_rows // 16):
                source = raw + slot * self.memory.slot_bytes + (16 * j + row) * (2 * self.channels) + m * 16
                own = i * self.memory.query_rows + 16 * j + row
                target = Int32(exchange.queries.iterator.toint()) + 2 * CHUNK * own
                for n in cutlass.range_constexpr((blocks + count - 1) // count):
                    block = n * count + thread.side
                    # Step s of 16 channels has vectors 2 s and 2 s + 1; of a vector, lane t of a quad of lanes
                    # multiplies word t. A lane reads of bytes channels 16 t to 16 t + 15, four of each of four steps;
                    # of bf16 channels 8 t to 8 t + 7 of 32, four of each of two steps.
                    vector, word = (m & 1) << 2, m >> 1
                    if block == self.byte_blocks:
                        vector, word = m & 4, m & 3
                    if block < blocks:
                        words = load_16(source + 2 * CHUNK * block)
                        for pair in cutlass.range_constexpr(4):
                            number = words[pair]
                            if block < self.byte_blocks:
                                number = times_to_f16(number, inverse, inverse)
                            if own >= rows:
                                number = Uint32(0)
                            place = 2 * CHUNK * self.rows * block + 16 * ((vector + pair) ^ (own & 7)) + 4 * word
                            store_4(target + place, number)
        self.meet_all()
        for i in cutlass.range_constexpr(self.memory.query_slots):
            slot, _ = self.memory.position(ring + i)
            if thread.side == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(rings.empty + slot)
        return power
