"""Sort a few tokens' (token, expert) entries by expert, in a CTA or a cluster: the last part of the routing kernels.

A warp has a token's experts, one entry per lane. Each entry gets a key: its expert's index among the experts of this
process in the high bits, the entry's index in the low bits. Entries of other processes' experts come last. So entries
sorted by key are in the order of the result, and no two keys are equal. Each warp sends its keys to the shared memory
of every CTA, and after one barrier every CTA has all keys. The row of an entry is the number of smaller keys. The end
of an expert's rows is the number of keys of this expert and of lower experts. A warp counts keys for BATCH entries or
experts at a time; each lane compares every 32nd key.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from dsa.cute.registers import filled
from dsa.cute.sm90 import WARP, cluster_sync
from dsa.kernels.moe.moe_gate_sm90 import LAST
from dsa.kernels.moe.route_to_experts_limits import FEW_TOKENS, MAX_TOKENS

WARPS = 16
CTAS = 8  # per cluster: 128 warps, although there are at most 64 tokens, because all warps count keys
BATCH = 4  # entries or experts per warp and pass over the keys
ENTRY_BITS = 16  # bits of a key for the entry's index


class EntryOrder:
    """few: whether there are at most FEW_TOKENS tokens. ctas: the kernel's number of CTAs. places: number of Int32 keys
    that shared memory must have room for."""

    def __init__(self, top_k: int, few: bool):
        self.top_k, self.ctas = top_k, 1 if few else CTAS
        self.places = -(-(FEW_TOKENS if few else MAX_TOKENS) * top_k // WARP) * WARP

    @cute.jit
    def fill_up(self, keys: cute.Tensor, entries: Int32, tid: Int32):
        """Pad this CTA's keys to a multiple of 32 with LAST, which is above all keys."""
        if tid < WARP and entries + tid < cute.ceil_div(entries, WARP) * WARP:
            keys[entries + tid] = Int32(LAST)

    @cute.jit
    def write(
        self, keys: cute.Tensor, order: cute.Tensor, rows: cute.Tensor, ends: cute.Tensor, entries, rank, warp, lane
    ):
        """Wait until all warps have sent their keys, and write `order`, `rows` and `ends` (see
        `compile_route_by_table`). All threads call this."""
        if const_expr(self.ctas > 1):
            cluster_sync()
        else:
            cute.arch.sync_threads()
        step = self.ctas * WARPS * BATCH
        for begin in cutlass.range((rank * WARPS + warp) * BATCH, entries + ends.shape[0], step, unroll=1):
            self.answer(keys, order, rows, ends, begin, entries, lane)

    @cute.jit
    def send(self, keys: cute.Tensor, own: Int32, count: Int32, entry: Int32):
        """Send the key of entry number `entry` to all CTAs. own: the index of the entry's expert among the `count`
        experts of this process. Entries with other indices come last."""
        group = own if own >= 0 and own < count else count
        key = (group << ENTRY_BITS) | entry
        if const_expr(self.ctas == 1):
            keys[entry] = key
        else:
            number = filled((1,), key, Int32)
            for rank in cutlass.range_constexpr(self.ctas):
                there = cute.arch.map_dsmem_ptr(keys.iterator + entry, Int32(rank))
                cute.autovec_copy(number, cute.make_tensor(there, cute.make_layout(1)))

    @cute.jit
    def answer(self, keys: cute.Tensor, order, rows, ends, begin: Int32, entries: Int32, lane):
        """Write the results of BATCH indices from `begin` on, each the number of keys below the index's bound. Index i
        < `entries` is entry i, and its key is the bound. Index `entries` + e is expert e, and the lowest possible key
        of expert e + 1 is the bound. One warp calls this."""
        count = ends.shape[0]
        bounds = cute.make_rmem_tensor((BATCH,), Int32)
        below = filled((BATCH,), 0, Int32)
        for i in cutlass.range_constexpr(BATCH):
            own = keys[cutlass.min(begin + i, entries - 1)]
            bounds[i] = own if begin + i < entries else (begin + i - entries + 1) << ENTRY_BITS
        for group in cutlass.range(cute.ceil_div(entries, WARP), unroll=4):
            key = keys[group * WARP + lane]
            for i in cutlass.range_constexpr(BATCH):
                below[i] += Int32(key < bounds[i])
        row = Int32(0)
        for i in cutlass.range_constexpr(BATCH):
            total = cute.arch.warp_redux_sync(below[i], "add")
            row = total if lane == i else row
        question = begin + lane
        if lane < BATCH and question < entries:
            order[row] = question
            rows[question] = row if keys[question] < count << ENTRY_BITS else Int32(-1)
        if lane < BATCH and question >= entries and question < entries + count:
            ends[question - entries] = row
