"""Candidates of a row that is too long for shared memory: the scores not below a threshold, in the order of columns.

The threshold is found in a sample of the row. The tiles of the row are then read through a pipeline of bulk copies. A
full list is cut to its k largest. With a cluster per row, each CTA lists a part of the row, and the first CTA gets all
lists. The kernel's plan (topk_indices_sm90.py) explains why the result is exact.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, const_expr

from dsa.cute.pipeline import Mbarriers, start
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.radix_select import (
    VECTOR_BYTES,
    SelectMemory,
    find_floor,
    lowest_bits,
    mask_from,
    next_above,
)
from dsa.kernels.indexer.topk_config import TopkConfig
from dsa.kernels.indexer.topk_row import Row, load_row

MINUS_INFINITY, NAN = Float32(float("-inf")), Float32(float("nan"))
ITEMS_AT_ONCE = 4  # candidates per thread and round when a list is cut
SAMPLE = 4096  # most numbers in a sample; any list has room for them
MARGIN = 4.5  # in standard deviations, for independent numbers
MAX_ATTEMPTS = 3  # to read a row: two with a threshold, one without


@dataclass(frozen=True)
class Candidates:
    """A resident row, or a list of candidates: the scores and, for a list, their columns, relative to lo."""

    scores: cute.Tensor
    columns: cute.Tensor


class CandidateCollector:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: TopkConfig):
        self.dtype, self.cfg = dtype, cfg
        self.threads, self.capacity, self.cluster, self.stages = cfg.threads, cfg.capacity, cfg.cluster, cfg.stages
        self.width = VECTOR_BYTES * 8 // dtype.width
        self.tile_vectors = cfg.threads * cfg.tile // self.width

    @cute.jit
    def collect(
        self,
        row: Row,
        rank,
        k,
        candidates: Candidates,
        tiles: cute.Tensor,
        memory: SelectMemory,
        loaded: Mbarriers,
        list_sizes: cute.Tensor,
        tid,
    ):
        """List the row's candidates, for a cluster in its first CTA. -> number of candidates. NaN pads the list to a
        whole vector.

        loaded: a full barrier for each stage of `tiles`. Empty barriers are not needed, because the scan over a tile's
        counts synchronizes all threads."""
        lane, warp = tid % WARP, tid // WARP
        each = (row.vectors + self.cluster - 1) // self.cluster
        first = cutlass.min(rank * each, row.vectors)
        behind = cutlass.min(first + each, row.vectors)
        number_of_tiles = (behind - first + self.tile_vectors - 1) // self.tile_vectors
        count, total, list_size, threshold = Int32(0), Int32(0), Int32(0), MINUS_INFINITY
        state, attempt = start(), Int32(0)
        while attempt < MAX_ATTEMPTS:
            sampled = row.n > self.capacity and attempt < MAX_ATTEMPTS - 1
            # Issue the sample's few loads first. After the tiles' loads, they would wait long.
            if sampled:
                self.load_sample(row, candidates.scores, tid)
            if tid == 0:
                stage = state.stage
                for t in cutlass.range(cutlass.min(number_of_tiles, self.stages), unroll=1):
                    self.load_tile(row, first, behind, t, stage, tiles, loaded)
                    stage = 0 if stage == self.stages - 1 else stage + 1
            threshold, count = MINUS_INFINITY, Int32(0)
            if sampled:
                threshold = self.find_threshold(row.n, k, attempt, candidates.scores, memory, tid)
            for t in cutlass.range(number_of_tiles, unroll=1):
                tile = tiles[None, state.stage]
                loaded.wait(state.phase, state.stage)
                begin = first + t * self.tile_vectors
                length = cutlass.min(behind - begin, self.tile_vectors)
                own = self.cfg.tile // self.width
                place = tid * self.cfg.tile
                column = begin * self.width + place - row.ahead
                mask = mask_from(tile, length, Int32(own), threshold, tid)
                here = Int32(cute.arch.popc(mask))
                before, found = block_exclusive_scan(here, memory.sums[t & 1, None], lane, warp)
                last = self.stages - 1
                if tid == 0 and t > 0 and t + last < number_of_tiles:
                    # All threads are done with the previous tile: load the next missing tile into its stage.
                    stage_before = last if state.stage == 0 else state.stage - 1
                    self.load_tile(row, first, behind, t + last, stage_before, tiles, loaded)
                while count + found > self.capacity:
                    # Fill the list, cut it, and continue with the rest of the tile.
                    fits = cutlass.max(cutlass.min(self.capacity - count - before, here), 0)
                    these = lowest_bits(mask, fits)
                    self.append(tile, place, column, these, count + before, candidates)
                    threshold = self.cut(candidates, Int32(self.capacity), k, memory, tid)
                    count = k
                    mask = (mask ^ these) & mask_from(tile, length, Int32(own), threshold, tid)
                    here = Int32(cute.arch.popc(mask))
                    before, found = block_exclusive_scan(here, memory.sums[t & 1, None], lane, warp)
                    cute.arch.sync_threads()
                self.append(tile, place, column, mask, count + before, candidates)
                count += found
                state = state.advance(self.stages)
            total, list_size = count, Int32(0)
            if const_expr(self.cluster > 1):
                total, list_size = self.all_list_sizes(list_sizes, attempt, count, tid)
            attempt += 1
            if total >= k or threshold == MINUS_INFINITY:
                attempt = Int32(MAX_ATTEMPTS)
            cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            count = self.gather(candidates, count, total, list_size, k, memory, list_sizes, rank, tid)
        self.fill_vector(candidates, count, tid)
        return count

    @cute.jit
    def fill_vector(self, candidates: Candidates, count, tid):
        """Pad a list with NaN to a whole vector. Begins and ends with a barrier."""
        cute.arch.sync_threads()
        if tid < (0 - count) & (self.width - 1):
            candidates.scores[count + tid] = self.dtype(float("nan"))
        cute.arch.sync_threads()

    @cute.jit
    def load_tile(self, row: Row, first, behind, t, stage, tiles: cute.Tensor, loaded: Mbarriers):
        begin = first + t * self.tile_vectors
        end = cutlass.min(begin + self.tile_vectors, behind)
        load_row(row, begin, end, tiles[None, stage], loaded.barrier(stage))

    @cute.jit
    def load_sample(self, row: Row, target: cute.Tensor, tid):
        """Start asynchronous copies of pairs of vectors from all over the row to `target`."""
        whole = 1 if row.ahead > 0 else 0
        pairs = ((row.n + row.ahead) // self.width - whole) // 2
        samples = self.samples(row.n)
        step = pairs // (samples // 2)
        for i in cutlass.range(tid, samples, self.threads, unroll=1):
            pair = i // 2
            jitter = Int32(cute.arch.mul_hi(Uint32(pair) * Uint32(2654435761), Uint32(step)))
            column = (whole + 2 * (pair * step + jitter) + i % 2) * self.width - row.ahead
            async_load_16(target.iterator + i * self.width, row.scores.iterator + (row.lo + column))

    @cute.jit
    def samples(self, n) -> Int32:
        """Number of vectors to sample from n numbers."""
        return cutlass.min(n // 16, SAMPLE) // (2 * self.width) * 2

    @cute.jit
    def find_threshold(self, n, k, attempt, numbers: cute.Tensor, memory: SelectMemory, tid) -> Float32:
        """A number that is likely to be slightly below the row's k-th largest, or far below it in a second attempt. A
        few more candidates than needed do not hurt."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        samples = self.samples(n)
        each = Float32(samples * self.width) * cute.arch.rcp_approx(Float32(n))
        expected = Float32(k) * each
        rank = Int32(expected + MARGIN * cute.math.sqrt(expected, fastmath=True)) + 2 << attempt
        slack = cutlass.max(Int32(Float32(0.8 * self.capacity) * each) - rank, 0)
        return find_floor(numbers, samples, rank, slack, memory, tid, self.threads)[0]

    @cute.jit
    def append(self, tile: cute.Tensor, place, column, mask: Uint32, at, candidates: Candidates):
        """For each set bit j of the mask, copy number place + j of the tile to the list, from entry `at` on."""
        entry = at + Int32(cute.arch.popc(mask))
        while mask != 0:
            j = Int32(cute.arch.bfind(mask))
            mask ^= Uint32(1) << Uint32(j)
            entry -= 1
            candidates.scores[entry] = tile[place + j]
            candidates.columns[entry] = column + j

    @cute.jit
    def cut(self, candidates: Candidates, count, k, memory: SelectMemory, tid) -> Float32:
        """Keep the k largest of the list, in order. -> the least number that later candidates must reach.

        In place, a few entries per thread at a time: no write passes the reads. Begins and ends with a barrier.
        """
        self.fill_vector(candidates, count, tid)
        length = (count + self.width - 1) // self.width
        floor, equal, excess = find_floor(candidates.scores, length, k, Int32(0), memory, tid, self.threads)
        limit = equal if excess > 0 else self.capacity  # most entries to keep that equal the floor
        above = next_above(floor)
        kept, equals = Int32(0), Int32(0)
        x = cute.make_rmem_tensor((ITEMS_AT_ONCE,), Float32)
        column = cute.make_rmem_tensor((ITEMS_AT_ONCE,), Int32)
        for base in cutlass.range(0, count, ITEMS_AT_ONCE * self.threads, unroll=1):
            i = base + ITEMS_AT_ONCE * tid
            here = Int32(0)  # two counts in one scan: above the floor, and equal to it in the upper 16 bits
            for j in cutlass.range_constexpr(ITEMS_AT_ONCE):
                x[j] = NAN
                if i + j < count:
                    x[j], column[j] = Float32(candidates.scores[i + j]), candidates.columns[i + j]
                here += Int32(1) if x[j] >= above else (Int32(1 << 16) if x[j] >= floor else Int32(0))
            turn = (base // (ITEMS_AT_ONCE * self.threads)) & 1
            before, total = block_exclusive_scan(here, memory.sums[turn, None], tid % WARP, tid // WARP)
            same = equals + (before >> 16)
            entry = kept + (before & 0xFFFF) + cutlass.min(same, limit) - cutlass.min(equals, limit)
            for j in cutlass.range_constexpr(ITEMS_AT_ONCE):
                larger = x[j] >= above
                if larger or (x[j] >= floor and same < limit):
                    candidates.scores[entry] = self.dtype(x[j])
                    candidates.columns[entry] = column[j]
                    entry += 1
                if x[j] >= floor and not larger:
                    same += 1
            kept += (total & 0xFFFF) + cutlass.min(equals + (total >> 16), limit) - cutlass.min(equals, limit)
            equals += total >> 16
        cute.arch.sync_threads()
        return above

    @cute.jit
    def all_list_sizes(self, list_sizes: cute.Tensor, place, count, tid):
        """(entries of all lists of the cluster, entries of CTA lane % cluster's list). Each `place` can be used only
        once."""
        if tid == 0:
            list_sizes[place] = count
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        at = cute.arch.map_dsmem_ptr(list_sizes.iterator + place, tid % self.cluster).toint()
        list_size = cute.arch.inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(at)]
        )
        return cute.arch.warp_redux_sync(list_size if tid % WARP < self.cluster else Int32(0), "add"), list_size

    @cute.jit
    def gather(
        self,
        candidates: Candidates,
        count,
        total,
        list_size,
        k,
        memory: SelectMemory,
        list_sizes: cute.Tensor,
        rank,
        tid,
    ):
        """Append the other CTAs' lists to the first CTA's, in order. -> its number of entries. Ends with a barrier."""
        if total <= self.capacity:
            before = cute.arch.warp_redux_sync(list_size if tid % WARP < rank else Int32(0), "add")
            if rank > 0:
                self.copy_list(candidates, count, before, tid)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            count = total
        else:
            # Too many entries: append one CTA's list after the other, each cut to k. Two such lists fit.
            if count > k:
                self.cut(candidates, count, k, memory, tid)
                count = k
            list_size = self.all_list_sizes(list_sizes, Int32(MAX_ATTEMPTS), count, tid)[1]
            listed = cute.arch.shuffle_sync(list_size, 0)
            for peer in cutlass.range(1, self.cluster, unroll=1):
                more = cute.arch.shuffle_sync(list_size, peer)
                if listed + more > self.capacity:
                    if rank == 0:
                        self.cut(candidates, listed, k, memory, tid)
                    listed = k
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                if rank == peer:
                    self.copy_list(candidates, count, listed, tid)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                listed += more
            count = listed
        return count

    @cute.jit
    def copy_list(self, candidates: Candidates, count, at, tid):
        """Write this CTA's list into that of the cluster's first CTA, from entry `at` on."""
        number_at = cute.arch.map_dsmem_ptr(candidates.scores.iterator, 0).toint()
        column_at = cute.arch.map_dsmem_ptr(candidates.columns.iterator, 0).toint()
        size = self.dtype.width // 8
        bits = cute.make_tensor(
            cute.recast_ptr(candidates.scores.iterator, dtype=Uint16 if size == 2 else Int32),
            cute.make_layout(self.capacity),
        )
        for i in cutlass.range(tid, count, self.threads, unroll=2):
            cute.arch.inline_ptx(
                f"st.shared::cluster.b{8 * size} [{{$r0}}], {{$r1}}; st.shared::cluster.b32 [{{$r2}}], {{$r3}};",
                read_only_args=[
                    Int32(number_at) + (at + i) * size,
                    bits[i],
                    Int32(column_at) + (at + i) * 4,
                    candidates.columns[i],
                ],
            )


@cute.jit
def async_load_16(target: cute.Pointer, source: cute.Pointer):
    """Start to copy 16 bytes between 16-byte aligned addresses. `cp_async_wait_group(0)` and a barrier wait for the
    copies of the whole CTA."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16; cp.async.commit_group;",
        read_only_args=[Int32(target.toint()), Int64(source.toint())],
    )
