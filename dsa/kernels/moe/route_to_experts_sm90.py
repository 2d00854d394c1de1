"""Router, gate and sort for a few tokens. From x [T, H], a matrix [E, H] and a bias [E], the kernels compute the
experts of each token, the weights of these experts, and the order of (token, expert) entries by expert.

Plan
- Two kernels; the second is launched while the first runs. The first computes the logits with clusters on all SMs
  (SmallMProduct), because this is bound by loading the matrix. The second computes everything else and is bound by
  latency. A single kernel would have to be one cluster, so it would run on 8 SMs. Loading the matrix with 8 SMs would
  take longer than the start of a second kernel.
- The second kernel is one CTA for up to 8 tokens, otherwise a cluster of 8 CTAs. One warp per token runs the code of
  moe_gate_sm90.py, so experts and weights have the bits of that kernel. Then entry_order.py sorts.
Shared memory of the second kernel: 4 bytes per entry, and 8 top_k bytes per warp for a token's experts. Constraints: E
up to 512, top_k and n_group up to 32, T up to 64, channels a multiple of 32.
Roofline: the logits are bound by memory: the matrix is read once. The second kernel is bound by latency, about 60
instructions per selected expert.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake_contiguous, fake_rows, fake_stream
from dsa.cute.sm90 import WARP, thread_and_cta, warp_and_lane
from dsa.cute.small_m_product import SmallMProduct
from dsa.kernels.moe.entry_order import WARPS, EntryOrder
from dsa.kernels.moe.moe_gate_sm90 import LOWEST, MoeGateSm90, order_of
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, FEW_TOKENS, TILE_TOKENS
from dsa.runtime.compile_cache import Variants, cached, compile_sm90


class RouteToExpertsSm90:
    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        tile_tokens: int,
        experts: int,
        top_k: int,
        scores: str,
        n_group: int,
        topk_group: int,
        normalise: bool,
    ):
        self.logits = SmallMProduct(dtype, tile_tokens)
        self.gate = MoeGateSm90(experts, top_k, scores, n_group, topk_group, normalise)
        self.entries = EntryOrder(top_k, tile_tokens == FEW_TOKENS)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor,
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
        self.kernel(logits, bias, experts, weights, order, rows, ends, first, scale).launch(
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
        bias: cute.Tensor,
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
        smem = cutlass.memory.SmemAllocator()
        keys = smem.allocate_tensor(Int32, cute.make_layout(self.entries.places), 16)
        chosen = smem.allocate_tensor(Int64, cute.make_layout((self.gate.top_k, WARPS)), 16)
        if const_expr(self.entries.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()

        tokens, count = logits.shape[0], ends.shape[0]
        entries, token = tokens * self.gate.top_k, warp * self.entries.ctas + rank
        own, own_bias = (cute.make_rmem_tensor((self.gate.each,), Float32) for _ in range(2))
        for i in cutlass.range_constexpr(self.gate.each):
            e = cutlass.min(lane + 32 * i, self.gate.experts - 1)
            own[i], own_bias[i] = logits[cutlass.min(token, tokens - 1), e], bias[e]
        self.entries.fill_up(keys, entries, tid)
        # Without the barrier, the compiler would compute scores between the loads.
        cute.arch.sync_threads()
        if token < tokens:
            self.choose(own, own_bias, chosen[None, warp], weights, token, scale, lane)
        if const_expr(self.entries.ctas > 1):
            cute.arch.cluster_wait()
        if token < tokens and lane < self.gate.top_k:
            e = Int32(chosen[lane, warp])
            experts[token, lane] = Int64(e)
            self.entries.send(keys, e - first, count, token * self.gate.top_k + lane)
        self.entries.write(keys, order, rows, ends, entries, rank, warp, lane)

    @cute.jit
    def choose(self, own, own_bias, chosen: cute.Tensor, weights, token, scale: Float32, lane):
        """Run the gate for one token, and write `chosen` and `weights`. This lane has every 32nd logit in `own`, and
        the same experts' biases in `own_bias`."""
        score = cute.make_rmem_tensor((self.gate.each,), Float32)
        order = cute.make_rmem_tensor((self.gate.each,), Int32)
        for i in cutlass.range_constexpr(self.gate.each):
            score[i] = self.gate.score(own[i])
            there = lane + 32 * i < self.gate.experts
            order[i] = order_of(score[i] + own_bias[i]) if there else Int32(LOWEST)
        if const_expr(self.gate.n_group > self.gate.topk_group):
            self.gate.keep_best_groups(order, lane)
        # With stride 0, `select` writes to `chosen` whatever the token's index is.
        place = cute.make_tensor(chosen.iterator, cute.make_layout((1, self.gate.top_k), stride=(0, 1)))
        self.gate.select(score, order, place, weights, token, scale, lane)


@cached
def compile_route_to_experts(
    dtype: str,
    tile_tokens: int,
    experts: int,
    top_k: int,
    scores: str,
    n_group: int,
    topk_group: int,
    normalise: bool,
):
    """-> f(x [T, H] dtype, weight [E, H] dtype, bias fp32 [E], logits fp32 [T, E], topk_indices int64 [T, top_k],
    weights fp32 [T, top_k], order int32 [T top_k], rows int32 [T top_k], ends int32 [count], first, scale). T > 0, and
    at most FEW_TOKENS if tile_tokens is FEW_TOKENS, otherwise at most MAX_TOKENS. H is a multiple of 32, count > 0.
    Rows of x and weight start at multiples of 16 bytes, and all other tensors are contiguous. f writes `logits`,
    `topk_indices`, `weights`, `order`, `rows` and `ends`. This process has `count` experts, from expert `first` on.
    `order`, `rows` and `ends` are as in `compile_route_by_table`. scale: factor of all weights."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    entries = cute.sym_int()
    return compile_sm90(
        RouteToExpertsSm90(element, tile_tokens, experts, top_k, scores, n_group, topk_group, normalise),
        fake_rows(element, tokens, channels),
        fake_rows(element, experts, channels),
        fake_contiguous(Float32, experts),
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
    gates = [
        (256, 8, "sigmoid", 8, 4, True),  # V3.2
        (256, 8, "sigmoid", 1, 1, True),  # GLM-5
        (256, 6, "sqrtsoftplus", 1, 1, True),  # V4-Flash
        (384, 6, "sqrtsoftplus", 1, 1, True),  # V4-Pro
    ]
    return [
        (compile_route_to_experts, ("bfloat16", tokens, *gate))
        for gate in gates
        for tokens in (FEW_TOKENS, TILE_TOKENS)
    ]
