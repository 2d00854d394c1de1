"""Router and sort for a few tokens whose experts a table lists. The inputs are x [T, H], a matrix [E, H], token ids [T]
and a table [V, top_k] with the experts of each of V token ids. The kernels compute the weights of each token's experts,
and the order of (token, expert) entries by expert.

Plan
- The two kernels are those of route_to_experts_sm90.py, but the second kernel reads the experts instead of choosing
  them. One warp per token, one expert per lane: a lane reads an expert from its column of the token's row of the table,
  then the logit of this expert. Scores (sqrtsoftplus) and weights come from the code of moe_gate_sm90.py, so they have
  the bits of that kernel. Then entry_order.py sorts.
- A token without a row in the table, or a number in the table outside [0, E), gives expert -1 with weight 0.
Shared memory: 4 bytes per entry. Constraints: E up to 512, top_k up to 32, T up to 64, channels a multiple of 32.
Roofline: the logits are bound by memory: the matrix is read once. The second kernel is bound by the latency of three
dependent loads: token id, table entry, logit.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_contiguous, fake_rows, fake_stream
from dsa.cute.sm90 import WARP, thread_and_cta, warp_and_lane
from dsa.cute.small_m_product import SmallMProduct
from dsa.kernels.moe.entry_order import WARPS, EntryOrder
from dsa.kernels.moe.moe_gate_sm90 import MoeGateSm90
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, FEW_TOKENS, TILE_TOKENS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90


class RouteByTableSm90:
    def __init__(self, dtype: type[cutlass.Numeric], tile_tokens: int, experts: int, top_k: int):
        self.logits = SmallMProduct(dtype, tile_tokens)
        self.gate = MoeGateSm90(experts, top_k, "sqrtsoftplus", 1, 1, True)
        self.entries = EntryOrder(top_k, tile_tokens == FEW_TOKENS)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        table: cute.Tensor,
        token_ids: cute.Tensor,
        logits: cute.Tensor,
        experts: cute.Tensor,
        weights: cute.Tensor,
        order: cute.Tensor,
        rows: cute.Tensor,
        ends: cute.Tensor,
        first: Int32,
        scale: Float32,
        stream,
    ):
        self.logits(x, weight, logits, Float32(1.0), Int32(0), stream)
        self.kernel(logits, table, token_ids, experts, weights, order, rows, ends, first, scale).launch(
            grid=(self.entries.ctas, 1, 1),
            block=(WARP * WARPS, 1, 1),
            cluster=(self.entries.ctas, 1, 1),
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        table: cute.Tensor,
        token_ids: cute.Tensor,
        experts: cute.Tensor,
        weights: cute.Tensor,
        order: cute.Tensor,
        rows: cute.Tensor,
        ends: cute.Tensor,
        first: Int32,
        scale: Float32,
    ):
        tid, rank = thread_and_cta()
        warp, lane = warp_and_lane()
        keys = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.entries.places), 16)
        if const_expr(self.entries.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()

        tokens, count = logits.shape[0], ends.shape[0]
        entries, token = tokens * self.gate.top_k, warp * self.entries.ctas + rank
        self.entries.fill_up(keys, entries, tid)
        e = Int32(-1)
        if token < tokens:
            if lane < self.gate.top_k:
                e = self.named(table, token_ids[token], lane)
            score = Float32(0.0)
            if e >= 0:
                score = self.gate.score(logits[token, e])
            factor = self.gate.factor(score, scale)
            if lane < self.gate.top_k:
                experts[token, lane] = Int64(e)
                weights[token, lane] = score * factor
        if const_expr(self.entries.ctas > 1):
            cute.arch.cluster_wait()
        if token < tokens and lane < self.gate.top_k:
            # Subtracting `first` must not turn -1 into a valid index.
            own = e - first if e >= 0 else Int32(-1)
            self.entries.send(keys, own, count, token * self.gate.top_k + lane)
        self.entries.write(keys, order, rows, ends, entries, rank, warp, lane)

    @cute.jit
    def named(self, table: cute.Tensor, token_id: Int64, lane: Int32) -> Int32:
        """Return the expert in column `lane` of a token's row of the table. -1: no such row, or the number is outside
        [0, E)."""
        e = Int32(-1)
        if token_id >= 0 and token_id < table.shape[0]:
            number = table[token_id, lane]
            if number >= 0 and number < self.gate.experts:
                e = Int32(number)
        return e


@cached
def compile_route_by_table(dtype: str, tile_tokens: int, experts: int, top_k: int):
    """-> f(x [T, H] dtype, weight [E, H] dtype, table int64 [V, top_k], token_ids int64 [T], logits fp32 [T, E],
    experts int64 [T, top_k], weights fp32 [T, top_k], order int32 [T top_k], rows int32 [T top_k], ends int32 [count],
    first, scale). T > 0, and at most FEW_TOKENS if tile_tokens is FEW_TOKENS, otherwise at most MAX_TOKENS. H is a
    multiple of 32, count > 0. Rows of x and weight are aligned to 16 bytes, and all other tensors are contiguous.

    f writes `logits`, `experts`, `weights`, `order`, `rows` and `ends`. This process has `count` experts, from expert
    `first` on. Entry t * top_k + j is the j-th expert of token t. order[r] is the entry in row r. rows[i] is the row of
    entry i, or -1 if the entry's expert is -1 or another process has it. ends[e] is the end of the rows of expert
    `first` + e. scale: factor of all weights."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    entries = cute.sym_int()
    return compile_sm90(
        RouteByTableSm90(element, tile_tokens, experts, top_k),
        fake_rows(element, tokens, channels),
        fake_rows(element, experts, channels),
        fake_contiguous(Int64, cute.sym_int(), top_k),
        fake_contiguous(Int64, tokens),
        fake_contiguous(Float32, tokens, experts),
        fake_contiguous(Int64, tokens, top_k),
        fake_contiguous(Float32, tokens, top_k),
        fake_contiguous(Int32, entries),
        fake_contiguous(Int32, entries),
        fake_contiguous(Int32, cute.sym_int()),
        *(Int32(0), Float32(1.0), fake_stream()),
    )


def shipped_variants() -> Variants:
    """The variants for published models. Others are compiled at their first call."""
    return [
        (compile_route_by_table, ("bfloat16", tokens, count, 6))
        for count in (256, 384)  # experts of V4-Flash and V4-Pro
        for tokens in (FEW_TOKENS, TILE_TOKENS)
    ]
