"""The producer of sparse MLA attention for query groups: a group's Q as one tile, then the keys of its list.

This is topk_gather.py, except that an index is an entry of query_groups.py, a key with the queries that have
selected it. The valid mask of a tile has MASK_WORDS words per query of the group.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.kernels.mla.limits import TILE_N
from dsa.kernels.mla.mla_tiles import MASK_WORDS, KvPipeline, KvState
from dsa.kernels.mla.query_group_limits import GROUP_SIZES
from dsa.kernels.mla.query_groups import GroupRows, entry_key, entry_members
from dsa.kernels.mla.topk_gather import WARP_KEYS, Selection, TopkGather


class UnionGather(TopkGather):
    """Gather for groups of `size` queries."""

    def __init__(self, dtype: type[cutlass.Numeric], head_dim: int, v_stages: int, rope_stages: int, size: int):
        assert size in GROUP_SIZES.values()
        super().__init__(dtype, head_dim, v_stages, rope_stages)
        self.rows, self.masks = GroupRows(size), size

    @cute.jit
    def locate_row(self, q, query, first_row, warp, lane):
        """As `TopkGather.locate_row`; `query` is the number of a group."""
        row = warp * WARP_KEYS + lane % WARP_KEYS
        token, head = query * self.rows.size + self.rows.member(row), self.rows.head(row)
        valid = token < q.shape[0] and head < q.shape[2]
        token, head = cutlass.min(token, q.shape[0] - 1), cutlass.min(head, q.shape[2] - 1)
        return q[token, 0, head, None].iterator.toint(), valid

    @cute.jit
    def index_of(self, lists, counts, ends, query, tile, key):
        """Return the list entry of a tile's key, or 0 past the end of the list."""
        place = tile * TILE_N + key
        entry = Int32(0)
        if place < counts[0]:
            entry = lists[0].indices[query, place]
        return entry

    @cute.jit
    def find(self, selection: Selection, index):
        address, scales, _ = TopkGather.find(self, selection, entry_key(index))
        return address, scales, entry_members(index) != 0

    @cute.jit
    def selected(self, mask: Uint32, index: Int32, lane):
        """Return, in lane m < size, the bits of the keys that the group's m-th query has selected."""
        own = Uint32(0)
        for m in cutlass.range_constexpr(self.rows.size):
            of_member = Uint32(cute.arch.vote_ballot_sync((entry_members(index) >> m) & 1 != 0)) & 0xFFFF
            if lane == m:
                own = of_member
        return own

    @cute.jit
    def write_selected(self, pipeline: KvPipeline, selected: Uint32, warp, lane, state: KvState):
        if lane < self.rows.size:
            pipeline.valid_mask[lane * MASK_WORDS + warp, state.rope.stage] = selected
        cute.arch.sync_warp()
