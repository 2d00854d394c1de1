"""One-shot all-reduce (sum): each GPU writes its part into every GPU's memory, and adds up the parts that it receives.
A rank's part is its summand, a tensor. A place is 8 bytes of a tensor.

Plan
- A thread sends a place of a part as a packet of 16 bytes: four bytes and the turn, then the other four bytes and again
  the turn. The turn is the number of the sum. GPUs write and read 8 bytes atomically, so if a reader finds the current
  turn next to four bytes, these bytes are valid. There is no other signal and no barrier: a sum waits for one trip over
  NVLink only.
- Consecutive sums alternate between two buffers, so a GPU writes to the same buffer in sums n and n + 2. Before it
  writes for sum n + 2, it has received the packets of sum n + 1 from every other GPU. A GPU sends these after it has
  finished sum n. So no part is overwritten while it is read.
- A thread writes its places of this rank's part to all GPUs, including its own GPU. Then it adds the ranks' parts at
  the same places in fp32, in the order of the ranks, and rounds once. So all GPUs get the same bits.
- The turn is in device memory, so that each replay of a CUDA graph has a new turn. All threads of the kernel read the
  number of the last sum. The last CTA to do so stores the new turn. This happens while packets are in flight, so that
  it does not delay the kernel's end.
- A thread loads its first place together with the turn, and each further place after it has sent the previous one.
- A thread stops waiting after `patience` cycles, since another GPU's process may have died. It writes 1 + the rank that
  it waited for to `lost`, an address in host memory, and sets turns[2]. All other threads of this GPU and all later
  sums then stop waiting as well. The result of such a sum is undefined.
Constraints: all ranks compute the same sums in the same order, one at a time. Turns have 32 bits, so a turn repeats
after 2^32 sums. A packet that no sum has overwritten since would then be mistaken for a new one.
Shared memory: none. Registers: few.
Roofline: small tensors are bound by latency: a load, a trip over NVLink, and the load that receives the packet. Large
tensors are bound by NVLink: a GPU sends twice its part's bytes to each of the other GPUs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream
from dsa.cute.sm90 import thread_and_cta
from dsa.kernels.parallel.limits import DTYPES, HALVES, PART, RANKS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

THREADS = 256


def choose_ctas(places: int, sms: int) -> int:
    """All CTAs must be resident at once, because threads wait for other ranks."""
    return min(-(-places // THREADS), sms)


@cute.jit
def _send(address: Int64, first: Uint32, second: Uint32, turn: Uint32):
    cute.arch.inline_ptx(
        "st.volatile.global.v4.b32 [{$r0}], {" + "{$r1}, {$r3}, {$r2}, {$r3}" + "};",
        read_only_args=[address, first, second, turn],
    )


class Patience(NamedTuple):
    """How long a thread waits for a packet, and where it reports that it has stopped waiting.

    cycles   number of cycles after which a thread stops waiting
    gave_up  address of turns[2], which is not 0 if a thread of this GPU has stopped waiting
    lost     address in host memory to which a thread writes 1 + the rank for which it has stopped waiting
    """

    cycles: Int64
    gave_up: Int64
    lost: Int64


@cute.jit
def _look(address: Int64, turn: Uint32, gave_up: Int64):
    """-> (the packet's first word of data, its second word, whether both words are of this turn, whether a thread of
    this GPU has stopped waiting)"""
    first, one, second, other, stopped = cute.arch.inline_ptx(
        "ld.volatile.global.v4.b32 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}]; "
        "ld.volatile.global.b32 {$w4}, [{$r1}];",
        write_only_types=[Uint32] * 5,
        read_only_args=[address, gave_up],
    )
    return first, second, one == turn and other == turn, stopped != 0


@cute.jit
def _receive(address: Int64, turn: Uint32, rank: cutlass.Constexpr, patience: Patience):
    """Wait for a rank's packet of this turn, and return its two words of data. If the wait exceeds `patience`, or if
    another thread of this GPU has stopped waiting, report the rank and return the two words that memory contains."""
    began = cute.arch.clock64()
    first, second, arrived, stopped = _look(address, turn, patience.gave_up)
    while not (arrived or stopped):
        first, second, arrived, stopped = _look(address, turn, patience.gave_up)
        stopped = stopped or cute.arch.clock64() - began > patience.cycles
    if not arrived:
        cute.arch.inline_ptx(
            "st.volatile.global.b32 [{$r0}], 1; st.volatile.global.b32 [{$r1}], {$r2};",
            read_only_args=[patience.gave_up, patience.lost, Int32(rank + 1)],
        )
    return first, second


@cute.jit
def _address(memory: cute.Tensor, half: Int32, rank, place: Int32) -> Int64:
    return Int64(memory[half, rank, place, None].iterator.toint())


class OneShotSumSm90:
    def __init__(self, dtype: type[cutlass.Numeric], ranks: int):
        self.dtype, self.ranks = dtype, ranks
        self.width = 8 * PART // dtype.width

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        memory: cute.Tensor,
        memories: list[cute.Tensor],
        turns: cute.Tensor,
        rank: Int32,
        ctas: Int32,
        patience: Int64,
        lost: Int64,
        stream,
    ):
        self.launch((x,), y, memory, memories, turns, rank, ctas, patience, lost, stream)

    @cute.jit
    def launch(self, source, y, memory, memories, turns, rank, ctas, patience, lost, stream):
        self.kernel(source, y, memory, memories, turns, rank, patience, lost).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        source,
        y: cute.Tensor,
        memory: cute.Tensor,
        memories: list[cute.Tensor],
        turns: cute.Tensor,
        rank: Int32,
        patience: Int64,
        lost: Int64,
    ):
        tid, cta = thread_and_cta()
        ctas, _, _ = cute.arch.grid_dim()
        first, step, places = cta * THREADS + tid, ctas * THREADS, y.shape[0] // self.width
        scratch = self.scratch(tid)
        wait_for_prerequisite_grids()

        part = cute.make_rmem_tensor((self.width,), self.dtype)
        words = cute.recast_tensor(part, Uint32)
        turn = Uint32(turns[0]) + 1
        if first < places:
            self.load(source, first, part, scratch)
        half = Int32(turn & (HALVES - 1))
        for i in cutlass.range(first, places, step, unroll=1):
            for r in cutlass.range_constexpr(self.ranks):
                _send(_address(memories[r], half, rank, i), words[0], words[1], turn)
            if i + step < places:
                self.load(source, i + step, part, scratch)
        cute.arch.sync_threads()
        if tid == 0:
            readers = cute.arch.atomic_add(turns.iterator + 1, Int32(1), scope="gpu")
            if readers == ctas - 1:
                turns[1] = Int32(0)
                turns[0] = Int32(turn)

        total = cute.make_rmem_tensor((self.width,), Float32)
        waits = Patience(patience, Int64((turns.iterator + 2).toint()), lost)
        for i in cutlass.range(first, places, step, unroll=1):
            for r in cutlass.range_constexpr(self.ranks):
                words[0], words[1] = _receive(_address(memory, half, r, i), turn, r, waits)
                numbers = part.load().to(Float32)
                total.store(numbers if r == 0 else total.load() + numbers)
            part.store(total.load().to(self.dtype))
            cute.autovec_copy(part, cute.local_tile(y, (self.width,), (i,)))

    @cute.jit
    def scratch(self, tid: Int32) -> Int32:
        """In ExpertsSumSm90 this is a shared-memory address."""
        return Int32(0)

    @cute.jit
    def load(self, source, i: Int32, part: cute.Tensor, scratch: Int32):
        """Load place i of this rank's part into `part`. source: (x [n],)."""
        cute.autovec_copy(cute.local_tile(source[0], (self.width,), (i,)), part)


@cached
def compile_one_shot_sum(dtype: str, ranks: int):
    """-> f(x [n] dtype, y [n] dtype, memory [2, ranks, places, 4] int32, a list of all ranks' `memory`, turns [3]
    int32, rank, ctas, patience in cycles, lost). y gets the sum of the ranks' x. x has a whole number of places, more
    than 0 and at most `places`. All tensors except turns start at multiples of 16 bytes, and all CTAs must be resident
    at once. memory and turns are 0 on all ranks before the first sum. lost: address of 4 bytes in host memory that the
    GPU can write to."""
    kind, numbers = cute_dtype(dtype), cute.sym_int(divisibility=8 * PART // cute_dtype(dtype).width)
    x, y = fake(kind, (numbers,), (1,)), fake(kind, (numbers,), (1,))
    return compile_sm90(OneShotSumSm90(kind, ranks), x, y, *fake_memory(ranks), *fake_numbers(), fake_stream())


def fake_memory(ranks: int) -> tuple[cute.Tensor, list[cute.Tensor], cute.Tensor]:
    """Return fake tensors: this rank's receive buffer, the receive buffers of all ranks, and `turns` (number of the
    last sum, number of CTAs that have read it, whether a thread has stopped waiting)."""
    places = cute.sym_int()
    shape, stride = (HALVES, ranks, places, 4), (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 4, 1)
    memory, *memories = (fake(Int32, shape, stride) for _ in range(1 + ranks))
    return memory, memories, fake(Int32, (3,), (1,), 4)


def fake_numbers() -> tuple[Int32, Int32, Int64, Int64]:
    """Return placeholders for compilation: rank, number of CTAs, patience in cycles, `lost` (a host address)."""
    return Int32(0), Int32(1), Int64(1), Int64(0)


def shipped_variants() -> Variants:
    return [(compile_one_shot_sum, (dtype, ranks)) for dtype in DTYPES for ranks in RANKS]
