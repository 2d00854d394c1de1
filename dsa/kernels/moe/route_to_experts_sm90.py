"""Router, gate and sort of few tokens: of x [T, H] and a matrix [E, H] the experts of each token, their weights, and
the order of (token, expert) entries by expert.

Plan
- Two kernels, the second launched while the first runs: logits by clusters all over the GPU (router_logits.py), since
  what they cost is the matrix' bytes; then all else, which is latency. On 8 SMs alone the bytes would take longer than
  the second kernel's start.
- The second one is a CTA for up to 8 tokens, else a cluster of 8. A warp a token goes the way of the gate
  (moe_gate_sm90.py) with its code, so that the bits are the same. Each of the token's entries becomes a key: its
  expert's number among this process's above its own number, so that keys are in the order of the result and no two are
  equal. It goes to the shared memory of every CTA.
- Behind one barrier all CTAs have all keys. The row of an entry is how many keys are below its own, and the rows of an
  expert end behind those below the next expert's keys: warps count for BATCH of these questions at a time, each lane
  among every 32nd key.
Shared memory: 4 bytes an entry, and each token's experts. Constraints: E up to 512, top_k and n_group up to 32, T up to
64, channels a multiple of 32.
Roofline: of the logits memory, the matrix once; then latency, about 60 instructions a selected expert.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.sm90 import WARP
from dsa.kernels.moe.moe_gate_sm90 import LAST, LOWEST, MoeGateSm90, order_of
from dsa.kernels.moe.route_to_experts_limits import CHANNEL_MULTIPLE, FEW_TOKENS, MAX_TOKENS, TILE_TOKENS
from dsa.kernels.moe.router_logits import RouterLogits

WARPS = 16
CTAS = 8  # of a cluster: twice as many warps as there are tokens, for what is counted
BATCH = 4
ENTRY_BITS = 16  # of a key


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
        self.logits = RouterLogits(dtype, tile_tokens)
        self.gate = MoeGateSm90(experts, top_k, scores, n_group, topk_group, normalise)
        few = tile_tokens == FEW_TOKENS
        self.ctas = 1 if few else CTAS
        self.places = -(-(FEW_TOKENS if few else MAX_TOKENS) * top_k // WARP) * WARP  # of keys

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
        self.logits.launch(x, weight, logits, stream)
        self.kernel(logits, bias, experts, weights, order, rows, ends, first, scale).launch(
            grid=(self.ctas, 1, 1),
            block=(WARP * WARPS, 1, 1),
            cluster=(self.ctas, 1, 1),
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
        tid, _, _ = cute.arch.thread_idx()
        rank, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = SmemAllocator()
        keys = smem.allocate_tensor(Int32, cute.make_layout(self.places), 16)
        chosen = smem.allocate_tensor(Int64, cute.make_layout((self.gate.top_k, WARPS)), 16)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        wait_for_prerequisite_grids()

        tokens, count = logits.shape[0], ends.shape[0]
        entries, token = tokens * self.gate.top_k, warp * self.ctas + rank
        own, own_bias = (cute.make_rmem_tensor((self.gate.each,), Float32) for _ in range(2))
        for i in cutlass.range_constexpr(self.gate.each):
            e = cutlass.min(lane + 32 * i, self.gate.experts - 1)
            own[i], own_bias[i] = logits[cutlass.min(token, tokens - 1), e], bias[e]
        if tid < WARP and entries + tid < cute.ceil_div(entries, WARP) * WARP:
            keys[entries + tid] = Int32(LAST)
        # The compiler would put each load behind the scores before it, a latency each. It moves none over a barrier.
        cute.arch.sync_threads()
        if token < tokens:
            self.choose(own, own_bias, chosen[None, warp], weights, token, scale, lane)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_wait()
        if token < tokens and lane < self.gate.top_k:
            e = Int32(chosen[lane, warp])
            experts[token, lane] = Int64(e)
            self.send(keys, e - first, count, token * self.gate.top_k + lane)
        if const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        step = self.ctas * WARPS * BATCH
        for begin in cutlass.range((rank * WARPS + warp) * BATCH, entries + count, step, unroll=1):
            self.answer(keys, order, rows, ends, begin, entries, lane)

    @cute.jit
    def choose(self, own, own_bias, chosen: cute.Tensor, weights, token, scale: Float32, lane):
        """The gate of a token, of whose logits this lane has every 32nd: its experts to `chosen`, and their weights."""
        score = cute.make_rmem_tensor((self.gate.each,), Float32)
        order = cute.make_rmem_tensor((self.gate.each,), Int32)
        for i in cutlass.range_constexpr(self.gate.each):
            score[i] = self.gate.score(own[i])
            there = lane + 32 * i < self.gate.experts
            order[i] = order_of(score[i] + own_bias[i]) if there else Int32(LOWEST)
        if const_expr(self.gate.n_group > self.gate.topk_group):
            self.gate.keep_best_groups(order, lane)
        # Whatever the token, its experts go to the same place.
        place = cute.make_tensor(chosen.iterator, cute.make_layout((1, self.gate.top_k), stride=(0, 1)))
        self.gate.select(score, order, place, weights, token, scale, lane)

    @cute.jit
    def send(self, keys: cute.Tensor, own: Int32, count: Int32, entry: Int32):
        """The key of an entry to all CTAs. own: its expert's number among the `count` of this process."""
        group = own if own >= 0 and own < count else count
        key = (group << ENTRY_BITS) | entry
        if const_expr(self.ctas == 1):
            keys[entry] = key
        else:
            number = cute.make_rmem_tensor((1,), Int32)
            number[0] = key
            for rank in cutlass.range_constexpr(self.ctas):
                there = cute.arch.map_dsmem_ptr(keys.iterator + entry, Int32(rank))
                cute.autovec_copy(number, cute.make_tensor(there, cute.make_layout(1)))

    @cute.jit
    def answer(self, keys: cute.Tensor, order, rows, ends, begin: Int32, entries: Int32, lane):
        """The questions from number `begin` on: entries, then experts. A warp's work."""
        count = ends.shape[0]
        bounds = cute.make_rmem_tensor((BATCH,), Int32)
        below = cute.make_rmem_tensor((BATCH,), Int32)
        below.fill(0)
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
    """-> f(x [T, H], weight [E, H], bias fp32 [E], logits fp32 [T, E], topk_indices int64 [T, top_k], weights fp32
    [T, top_k], order int32 [T top_k], rows int32 [T top_k], ends int32 [count], first, scale); 0 < T, up to FEW_TOKENS
    with tiles of so many, else up to MAX_TOKENS; H a multiple of 32, count > 0, rows of x and weight at multiples of 16
    bytes, all others contiguous. Writes the logits and what stands behind them."""
    element, tokens, channels = cute_dtype(dtype), cute.sym_int(), cute.sym_int(divisibility=CHANNEL_MULTIPLE)
    entries = cute.sym_int()

    def operand(rows):
        return fake(element, (rows, channels), (*strides(1, 8), 1))

    def result(kind, *shape):
        inner = (shape[1], 1) if len(shape) == 2 else (1,)
        return fake(kind, shape, inner, kind.width // 8)

    return compile_sm90(
        RouteToExpertsSm90(element, tile_tokens, experts, top_k, scores, n_group, topk_group, normalise),
        *(operand(tokens), operand(experts), result(Float32, experts), result(Float32, tokens, experts)),
        *(result(Int64, tokens, top_k), result(Float32, tokens, top_k)),
        *(result(Int32, entries), result(Int32, entries), result(Int32, cute.sym_int())),
        *(Int32(0), Float32(1.0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """The published models'; others compile when they are asked for."""
    gates = [
        (256, 8, "sigmoid", 8, 4, True),  # V3.2
        (256, 8, "sigmoid", 1, 1, True),  # GLM-5
        (256, 6, "sqrtsoftplus", 1, 1, True),  # V4-Flash
        (384, 6, "sqrtsoftplus", 1, 1, True),  # V4-Pro
    ]
    tiles = FEW_TOKENS, TILE_TOKENS
    return [(compile_route_to_experts, ("bfloat16", tokens, *gate)) for gate in gates for tokens in tiles]
