"""The skeleton of the sparse MLA kernels: launch, shared memory, work tiles, warp roles. These variants compute all
queries:

- sparse_mla_sm90.py: 16-bit keys, 64 heads per CTA
- sparse_mla_cast_sm90.py: the same, with the result rotated back and cast to FP8
- sparse_mla_swap_ab_sm90.py: 16-bit keys, up to 32 heads, swap A/B (heads are N of the wgmmas)
- sparse_mla_fp8_kv_sm90.py: FP8 keys, 16, 32 or 64 heads per CTA, swap A/B
Two more variants compute the items of a queue (tile_scheduler.py), for up to 16 heads and 16-bit keys:
- sparse_mla_union_sm90.py: groups of queries over the union of their keys; M is queries x heads
- sparse_mla_queued_sm90.py: single queries, swap A/B

Work: a CTA computes `head_tile` heads of several queries, one query after the other, in tiles of TILE_N keys. For a
group of queries, the CTA computes `head_tile` rows, which are the queries x heads of the group.
Scheduler: StreamKScheduler, or QueueScheduler for a queue. With the StreamKScheduler full waves of whole queries come
first. The queries after them can be split among CTAs; then mla_combine_sm90.py combines the partial results. The CTAs
of one query's head tiles have adjacent indices, so they read the same keys at about the same time, from the L2 cache.
Warp roles: one or two score warpgroups, two output warpgroups, one load warpgroup, in this order.
Pipelines: the load warpgroup produces work tiles, rows of Q and keys. The score warpgroups consume work tiles,
Q and keys, and produce P. The output warpgroups consume work tiles, keys and P.
Launch: programmatic dependent launch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.sm90 import LOG2E, SHARED_BYTES, WARPGROUP
from dsa.kernels.mla.limits import HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_roles import Coord, Results, RoleRegisters, Thread
from dsa.kernels.mla.mla_softmax import ExchangeMemory
from dsa.kernels.mla.swap_ab_exchange import SwapAbExchangeMemory
from dsa.kernels.mla.tile_scheduler import Queue, QueueScheduler, StreamKScheduler
from dsa.kernels.mla.topk_gather import Selection, TopkGather


class SparseMlaKernel:
    """Sparse MLA attention. The compile function of a variant without a queue, other than sparse_mla_cast_sm90.py,
    returns:

    f(q [T, 1, h, d], caches [pages, P, d], indices [T, K], counts [n], counted, sink [m], has_sink, out
    [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_partial [splits, 1, h, 512], lse_partial
    [splits, 1, h], max_logits [T, h] or None, scale * log2(e), s_q, workers, full_waves, split_workers).

    caches, indices and counts are Python lists with one or two elements, one per list of keys; their K can differ. T,
    h, pages > 0. lse, partial results, max_logits and sink are fp32; indices and counts are int32. With max_logits, the
    layouts are those of prefill: q [T, h, d], one cache [s_kv, 1, d] with indices [T, 1, K], out [T, h, 512], lse
    [T, h].

    If bit i of `counted` is set, query t uses only its first counts[i][t // s_q] indices in list i, and n is T / s_q.
    Otherwise counts[i] is not read. If has_sink > 0, m is h; otherwise `sink` is not read. Rows of q and of the caches
    start at multiples of 16 bytes. The queries after the first full_waves * workers can be split, and `splits`, the
    number of partial results, is 2 * split_workers (StreamKScheduler). With max_logits the caller must choose these
    arguments so that no query is split.

    kv               stages of keys, and how they are loaded
    exchange_memory  layout of the memory through which score warpgroups pass P to the output warpgroups
    all_heads        whether a CTA computes all heads of a query; then h is at most head_tile

    A variant defines these methods, and can override `head_of_row` and `thread`. `group` is s_q as a divisor.

    operand_storage()  return the struct of Q and keys in shared memory
    shared(storage)    return the shared memory that the roles use, an MlaShared
    tiled_mmas()       return the tiled MMAs, which the host passes to the kernel
    score(q, results, shared, mmas, group, scale, coord)  run a score warpgroup
    output(results, shared, mmas, group, coord)           run an output warpgroup
    """

    all_heads = False

    def __init__(
        self,
        kv: TopkGather,
        exchange_memory: ExchangeMemory | SwapAbExchangeMemory,
        head_tile: int,
        score_warpgroups: int,
        registers: RoleRegisters,
    ):
        self.kv, self.exchange_memory = kv, exchange_memory
        self.head_tile, self.score_warpgroups, self.registers = head_tile, score_warpgroups, registers
        self.output_warp = 4 * score_warpgroups
        self.load_warp = self.output_warp + 8

    def head_of_row(self, row, first_head):
        """Return the head of the CTA's row `row`, as an index among all heads of a query."""
        return first_head + row

    def thread(self, warp, lane) -> Thread | None:
        """Return `Coord.thread`, the thread's position in the warp role. If a variant returns None, its roles compute
        the position themselves.

        The kernel calls this before it branches by role, so that ptxas keeps the position in uniform registers.
        """
        return None

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        caches: list[cute.Tensor],
        indices: list[cute.Tensor],
        counts: list[cute.Tensor],
        counted: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        max_logits: cute.Tensor | None,
        scale: Float32,
        group: Int32,
        workers: Int32,
        full_waves: Int32,
        split_workers: Int32,
        stream,
    ):
        if const_expr(max_logits is not None):
            q, caches, indices, out, lse = of_prefill(q, caches[0], indices[0], out, lse)
        self.launch(
            *(q, selections(caches, indices, counts, counted)),
            *(Results(out, lse, out_partial, lse_partial, max_logits), sink, has_sink, scale),
            *(group, workers, full_waves, split_workers, stream),
        )

    def launch(
        self,
        q,
        lists: list[Selection],
        results: Results,
        sink,
        has_sink,
        scale,
        group,
        workers,
        full_waves,
        split_workers,
        stream,
        queue: Queue | None = None,
        items: Int32 | None = None,
    ):
        """Launch the kernel. q, out and lse have the layouts of decoding.

        group  number of queries per sequence, s_q
        queue  the items to compute; None: compute all queries with a StreamKScheduler
        items  every item of the queue is below this number
        """

        @cute.struct
        class Storage:
            pipeline: self.kv.storage()
            sink: cute.struct.MemRange[Float32, self.head_tile]
            exchange: self.exchange_memory.storage()
            operands: self.operand_storage()

        self.storage = Storage
        assert self.storage.size_in_bytes() <= SHARED_BYTES
        head_tiles, ctas = None, workers
        if not self.all_heads:
            head_tiles = (q.shape[2] + self.head_tile - 1) // self.head_tile
            ctas = workers * head_tiles
        self.kernel(
            *(q, lists, results, sink, has_sink, scale),
            *(cute.fast_divmod_create_divisor_v2(group), workers, full_waves, split_workers, head_tiles),
            *(self.tiled_mmas(), queue, items),
        ).launch(
            grid=(ctas, 1, 1),
            block=((self.score_warpgroups + 3) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        lists: list[Selection],
        results: Any,
        sink: cute.Tensor,
        has_sink: Int32,
        scale: Float32,
        group: cute.FastDivmodDivisorV2,
        workers: Int32,
        full_waves: Int32,
        split_workers: Int32,
        head_tiles: Int32 | None,
        mmas: Any,
        queue: Queue | None,
        items: Int32 | None,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        worker, first_head = block, Int32(0)
        if const_expr(not self.all_heads):
            worker, first_head = block // head_tiles, block % head_tiles * self.head_tile
        storage = SmemAllocator().allocate(self.storage)
        shared = self.shared(storage)
        if tid == 0:
            self.kv.init(shared.pipeline, consumers=self.load_warp)
            shared.exchange.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        heads = q.shape[2]
        own_sink = storage.sink.get_tensor(cute.make_layout(self.head_tile))
        if tid < self.head_tile:
            own_sink[tid] = -Float32(float("inf"))
            head = self.head_of_row(tid, first_head)
            if has_sink > 0 and head < heads:
                own_sink[tid] = sink[head] * LOG2E
        results = replace(results, sink=own_sink)
        coord = Coord(tid, warp, lane, first_head, heads, self.thread(warp, lane))
        if warp >= self.load_warp:
            cute.arch.setmaxregister_decrease(self.registers.load)
            tiles = sum((selection.indices.shape[1] + TILE_N - 1) // TILE_N for selection in lists)
            if const_expr(queue is None):
                tiles = cutlass.max(tiles, 1)
                scheduler = StreamKScheduler(worker, workers, full_waves, q.shape[0], tiles, split_workers)
            else:
                scheduler = QueueScheduler(worker, workers, items, queue.items, queue.counts[queue.place])
            self.kv.load(
                q, shared.kv, shared.pipeline, lists, group, scheduler, first_head, warp - self.load_warp, lane
            )
        elif warp < self.output_warp:
            cute.arch.setmaxregister_increase(self.registers.score)
            self.score(q, results, shared, mmas, group, scale, coord)
        else:
            cute.arch.setmaxregister_increase(self.registers.output)
            self.output(results, shared, mmas, group, coord)


@cute.jit
def selections(caches, indices, counts, counted: Int32):
    """Return one Selection per list of keys. Bit i of `counted` says whether list i has counts."""
    found = []
    for i, cache in enumerate(caches):
        page_size = cute.fast_divmod_create_divisor_v2(cache.shape[1])
        found.append(Selection(cache, indices[i], counts[i], (counted >> i) & 1, page_size))
    return found


@cute.jit
def of_prefill(q, kv, indices, out, lse):
    """Return (q, [kv], [indices], out, lse) in the kernel's layouts: one query per sequence, and all keys in one page.

    The arguments have the layouts of prefill: q [T, h, d], kv [s_kv, 1, d], indices [T, 1, K], out [T, h, 512] and
    lse [T, h].
    """
    q, out = (rearranged(x, (0, 3, 1, 2)) for x in (q, out))
    return q, [rearranged(kv, (1, 0, 2))], [rearranged(indices, (0, 2))], out, rearranged(lse, (0, 1, 2))


@cute.jit
def rearranged(x, modes):
    """Return x with its dimensions in the order `modes`; dimensions that x lacks have size 1."""
    return cute.make_tensor(x.iterator, cute.select(cute.append_ones(x.layout, 4), mode=list(modes)))


def fake_arguments(
    dtype: type[cutlass.Numeric], head_dim: int, lists: int, cache: Callable[[], cute.Tensor], with_max_logits: bool
) -> tuple:
    """Return the fake arguments of a sparse MLA kernel (see `SparseMlaKernel`).

    lists            number of lists of keys, 1 or 2
    cache            makes a fake cache; not called if with_max_logits
    with_max_logits  use the layouts of prefill, and a tensor max_logits instead of None
    """
    queries, heads, width = cute.sym_int(), cute.sym_int(), cute.sym_int()
    counts, sink = [fake(Int32, (cute.sym_int(),), (1,), 4) for _ in range(lists)], fake_sink()
    numbers = *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)), fake_stream()
    results = fake_results(dtype, heads)
    if with_max_logits:
        assert lists == 1
        lse, max_logits = (fake(Float32, (queries, heads), (*strides(1), 1), 4) for _ in range(2))
        return (
            fake(dtype, (queries, heads, head_dim), (*strides(2, 8), 1)),
            [fake(dtype, (cute.sym_int(), 1, head_dim), (*strides(2, 8), 1))],
            [fake(Int32, (queries, 1, width), (*strides(2), 1), 4)],
            *(counts, Int32(0), *sink),
            fake(dtype, (queries, heads, HEAD_DIM_V), (*strides(1, 8), HEAD_DIM_V, 1)),
            *(lse, *results[2:], max_logits, *numbers),
        )
    return (
        fake(dtype, (queries, 1, heads, head_dim), (*strides(3, 8), 1)),
        [cache() for _ in range(lists)],
        [fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) for _ in range(lists)],
        *(counts, Int32(0), *sink, *results, None, *numbers),
    )


def queued_arguments(dtype: type[cutlass.Numeric], head_dim: int) -> tuple[tuple, tuple]:
    """Return the fake arguments of prefill with one list of keys, in two parts: (q to has_sink, out to max_logits)."""
    arguments = fake_arguments(dtype, head_dim, 1, lambda: None, with_max_logits=True)
    return arguments[:7], arguments[7:12]


def fake_cache(dtype: type[cutlass.Numeric], head_dim: int) -> cute.Tensor:
    """Return a fake 16-bit cache [pages, P, d]; keys start at multiples of 16 bytes."""
    return fake(dtype, (cute.sym_int(), cute.sym_int(), head_dim), (*strides(2, 8), 1))


def fake_sink() -> tuple:
    return fake(Float32, (cute.sym_int(),), (1,), 4), Int32(0)


def fake_results(dtype: type[cutlass.Numeric], heads) -> tuple:
    """Return fake arguments for out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_partial [splits, 1, h, 512] and
    lse_partial [splits, 1, h].
    """
    batch, group, splits = (cute.sym_int() for _ in range(3))
    return (
        fake(dtype, (batch, group, heads, HEAD_DIM_V), (*strides(2, 8), HEAD_DIM_V, 1)),
        fake(Float32, (batch, heads, group), strides(3), 4),
        fake(Float32, (splits, 1, heads, HEAD_DIM_V), (*strides(2, 4), HEAD_DIM_V, 1)),
        fake(Float32, (splits, 1, heads), (*strides(2), 1), 4),
    )
