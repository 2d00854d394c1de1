"""The gate of a mixture of experts: scores (sigmoid or sqrt(softplus) of the logits), the best groups, the best experts
in these groups, and their weights.

Plan
- One warp per token. Lane l has the experts l, l + 32 and so on. It keeps each expert's score, and the order of the
  expert's biased score (score + bias). The order is an integer that sorts like the biased score (`order_of`). So one
  redux instruction finds the largest order. A second one finds the lowest expert with this order (ties go to the lowest
  index).
- If n_group > topk_group, the warp finds the two best experts of each group, and the topk_group groups in which the sum
  of the two biased scores is largest. Then the warp selects the best remaining expert top_k times. Lane k keeps the
  k-th expert.
Shared memory: none. Registers per thread: 2 ceil(E / 32) and a dozen. Constraints: E up to 1024, top_k and n_group up
to 32.
Roofline: bound by latency, about 60 instructions per selected expert. Memory: 4 E bytes per token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake_contiguous, fake_rows, fake_stream
from dsa.cute.sm90 import WARP, thread_and_cta
from dsa.runtime.compile_cache import Variants, cached, compile_sm90

WARPS = 4
LOWEST = -(2**31)  # order of an expert that is not a candidate, below the order of -inf
LAST = 2**31 - 1  # the largest order, that of NaN; as an index, after all experts
LEAST_SUM = 1e-20  # added to the sum that weights are divided by, so that it is never 0


class MoeGateSm90:
    def __init__(self, experts: int, top_k: int, scores: str, n_group: int, topk_group: int, normalise: bool):
        self.experts, self.top_k, self.scores = experts, top_k, scores
        self.n_group, self.topk_group, self.normalise = n_group, topk_group, normalise
        self.each = -(-experts // 32)
        self.group = experts // n_group

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor,
        topk_indices: cute.Tensor,
        weights: cute.Tensor,
        scale: Float32,
        stream,
    ):
        self.kernel(logits, bias, topk_indices, weights, scale).launch(
            grid=(cute.ceil_div(logits.shape[0], WARPS), 1, 1), block=(WARP * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, logits: cute.Tensor, bias: cute.Tensor, topk_indices: cute.Tensor, weights: cute.Tensor, scale: Float32
    ):
        tid, block = thread_and_cta()
        token, lane = block * WARPS + tid // WARP, tid % WARP
        wait_for_prerequisite_grids()
        if token < logits.shape[0]:
            score = cute.make_rmem_tensor((self.each,), Float32)
            order = cute.make_rmem_tensor((self.each,), Int32)
            for i in cutlass.range_constexpr(self.each):
                e = lane + 32 * i
                there = e < self.experts
                at = e if there else Int32(0)
                score[i] = self.score(logits[token, at])
                order[i] = order_of(score[i] + bias[at]) if there else Int32(LOWEST)
            if const_expr(self.n_group > self.topk_group):
                self.keep_best_groups(order, lane)
            self.select(score, order, topk_indices, weights, token, scale, lane)

    @cute.jit
    def score(self, x: Float32) -> Float32:
        if const_expr(self.scores == "sigmoid"):
            return 1.0 / (1.0 + cute.math.exp(-x))
        u = cute.math.exp(x)
        # A series for log1p(u): 1 + u would keep few bits of a small u.
        small = u * (1.0 - u * (1 / 2 - u * (1 / 3 - u * (1 / 4 - u * (1 / 5 - u * (1 / 6))))))
        softplus = small if u < 0.1 else cute.math.log(1.0 + u)
        return cute.math.sqrt(x if x > 20.0 else softplus)

    @cute.jit
    def keep_best_groups(self, order, lane):
        """Keep the `topk_group` best groups. Set the orders of all other groups' experts to the order of -inf."""
        of_group = cute.make_rmem_tensor((self.n_group,), Int32)
        for g in cutlass.range_constexpr(self.n_group):
            best, second = Int32(LOWEST), Int32(LOWEST)
            for i in cutlass.range_constexpr(self.each):
                if const_expr(g * self.group < 32 * i + 32 and 32 * i < (g + 1) * self.group):
                    inside = (lane + 32 * i) // self.group == g
                    own = order[i] if inside else Int32(LOWEST)
                    second = cutlass.max(second, cutlass.min(best, own))
                    best = cutlass.max(best, own)
            first = cute.arch.warp_redux_sync(best, "max")
            total = number_of(first)
            if const_expr(self.group > 1):
                holders = cute.arch.vote_ballot_sync(best == first)
                # The first lane with the group's best score contributes its second best score, and each other lane its
                # best score. The largest contribution is the group's second best score.
                mine = holders & ((1 << lane) - 1) == 0 and best == first
                total += number_of(cute.arch.warp_redux_sync(second if mine else best, "max"))
            of_group[g] = order_of(total)
        stays = cute.make_rmem_tensor((self.n_group,), Int32)
        for g in cutlass.range_constexpr(self.n_group):
            above = Int32(0)
            for h in cutlass.range_constexpr(self.n_group):
                if const_expr(h < g):
                    above += Int32(of_group[h] >= of_group[g])
                if const_expr(h > g):
                    above += Int32(of_group[h] > of_group[g])
            stays[g] = Int32(above < self.topk_group)
        without = order_of(-Float32(float("inf")))
        for i in cutlass.range_constexpr(self.each):
            keep = Int32(0)
            for g in cutlass.range_constexpr(self.n_group):
                if const_expr(g * self.group < 32 * i + 32 and 32 * i < (g + 1) * self.group):
                    keep = stays[g] if (lane + 32 * i) // self.group == g else keep
            order[i] = order[i] if keep != 0 or order[i] == LOWEST else without

    @cute.jit
    def select(self, score, order, topk_indices, weights, token, scale: Float32, lane):
        own_index, own_score = Int32(0), Float32(0.0)
        for k in cutlass.range_constexpr(self.top_k):
            best, e = Int32(LOWEST), Int32(LAST)
            for i in cutlass.range_constexpr(self.each):
                better = order[i] > best
                best = order[i] if better else best
                e = lane + 32 * i if better else e
            top = cute.arch.warp_redux_sync(best, "max")
            e = cute.arch.warp_redux_sync(e if best == top else Int32(LAST), "min")
            value = Float32(0.0)
            for i in cutlass.range_constexpr(self.each):
                selected = e == lane + 32 * i
                value = score[i] if selected else value
                order[i] = Int32(LOWEST) if selected else order[i]
            value = cute.arch.shuffle_sync(value, e % 32)
            own_index = e if lane == k else own_index
            own_score = value if lane == k else own_score
        factor = self.factor(own_score, scale)
        if lane < self.top_k:
            topk_indices[token, lane] = Int64(own_index)
            weights[token, lane] = own_score * factor

    @cute.jit
    def factor(self, own_score: Float32, scale: Float32) -> Float32:
        """Return the factor that turns a token's selected scores into weights."""
        if const_expr(not self.normalise):
            return scale
        return scale / (cute.arch.warp_reduction_sum(own_score) + Float32(LEAST_SUM))


@cute.jit
def order_of(x: Float32) -> Int32:
    """Return the order of x, an integer that sorts like x. Both zeros have the same order, and NaN has the largest."""
    bits = cute.arch.inline_ptx("add.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Int32], read_only_args=[x])
    bits = bits if x == x else Int32(LAST)
    return bits ^ ((bits >> 31) & LAST)


@cute.jit
def number_of(order: Int32) -> Float32:
    bits = order ^ ((order >> 31) & LAST)
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


@cached
def compile_moe_gate(experts: int, top_k: int, scores: str, n_group: int, topk_group: int, normalise: bool):
    """-> f(logits fp32 [T, E], bias fp32 [E], topk_indices int64 [T, top_k], weights fp32 [T, top_k], scale); T > 0.
    The last dimensions are contiguous. scale: factor of all weights."""
    tokens = cute.sym_int()
    return compile_sm90(
        MoeGateSm90(experts, top_k, scores, n_group, topk_group, normalise),
        fake_rows(Float32, tokens, experts, align=4),
        fake_contiguous(Float32, experts),
        fake_rows(Int64, tokens, top_k, align=8),
        fake_rows(Float32, tokens, top_k, align=4),
        *(Float32(1.0), fake_stream()),
    )


def shipped_variants() -> Variants:
    """The gates of published models. Other gates are compiled at their first call."""
    return [
        (compile_moe_gate, (256, 8, "sigmoid", 8, 4, True)),  # V3.2
        (compile_moe_gate, (256, 8, "sigmoid", 1, 1, True)),  # GLM-5
        (compile_moe_gate, (256, 6, "sqrtsoftplus", 1, 1, True)),  # V4-Flash
        (compile_moe_gate, (384, 6, "sqrtsoftplus", 1, 1, True)),  # V4-Pro
    ]
