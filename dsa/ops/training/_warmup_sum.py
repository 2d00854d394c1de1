"""Launch the kernels of the warm-up loss and its gradients for one chunk of queries after another. The target of the
loss is the sum of all heads' attention, divided by the number of heads."""

import itertools
from dataclasses import dataclass

import torch

from dsa.kernels.training.limits import INDEX_CHANNELS, INDEX_HEADS, K_TILE, MAX_INDEX_HEADS, Q_TILE, Q_TILE_FIELDS
from dsa.ops.training._indexer_gradient import active_shape, index_key_grad, index_query_grad, index_scores
from dsa.ops.training._packed_attention import Sequences
from dsa.runtime import backends
from dsa.runtime.declare import at_most, dtype_name, tma_rows

LEAST_WORKSPACE = 192 << 20  # lower bound of the workspace's budget, in bytes
SHARE = 15 / 16  # the budget as a fraction of the inputs' bytes
INDEXER_LIMITS = {"di": INDEX_CHANNELS, "Hi": at_most(MAX_INDEX_HEADS, least=1)}  # Hi: before padding


@dataclass(frozen=True)
class Plan:
    """The q tiles of packed queries. A kernel writes both tensors (q_tile_plan_sm90.py), so the host does not know
    their contents.

    q_tiles        int32 [S, 8]: a row per q tile (q_tiles.py)
    key_tiles      int32 [S + 1]: entry i is the number of key tiles of all q tiles before q tile i; the last entry is
                   the total
    max_key_tiles  upper bound of a q tile's key tiles, from max_seqlen_k
    """

    q_tiles: torch.Tensor
    key_tiles: torch.Tensor
    max_key_tiles: int

    def chunks(self, bytes_of_q_tile: int, budget: int, workers: int = 0) -> list[slice]:
        """Return the fewest ranges of q tiles whose workspace has at most `budget` bytes each (more if a single q tile
        needs more). All ranges but the last have the same size.

        workers: number of CTAs of the kernel that processes score tiles, one per q tile and key tile. If it is not 0,
        the size is rounded down to whole waves of these CTAs where possible. Waves are estimated for causal attention
        and sequences of the maximum length."""
        count = len(self.q_tiles)
        most = max(1, budget // max(bytes_of_q_tile, 1))
        chunks = -(-count // most)
        each = -(-count // chunks)
        # Q tiles per wave of `workers` score tiles, if a q tile has (max_key_tiles + 1) / 2 score tiles on average.
        turn = 2 * workers / (self.max_key_tiles + 1)
        whole = int(each // turn * turn) if turn else 0
        last = count - (chunks - 1) * whole
        begins = range(0, count - last + 1, whole) if whole and 0 < last <= most else range(0, count, each)
        return [slice(begin, end) for begin, end in itertools.pairwise([*begins, count])]

    def only_if(self, wanted: torch.Tensor) -> "Plan":
        """Return the same plan, or a plan without work if `wanted`, a bool tensor on the device, is false."""
        return Plan(self.q_tiles * wanted, self.key_tiles * wanted, self.max_key_tiles)


@dataclass(frozen=True)
class Indexer:
    """The indexer's tensors as the kernels need them: index heads padded with zeros (`padded_heads`), w in fp32, rows
    at multiples of 16 bytes."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor

    @classmethod
    def of(cls, q_idx: torch.Tensor, k_idx: torch.Tensor, w_idx: torch.Tensor) -> "Indexer":
        missing = padded_heads(q_idx.shape[1]) - q_idx.shape[1]
        q, w = q_idx, w_idx.float()
        if missing:
            q = torch.nn.functional.pad(q, (0, 0, 0, missing))
            w = torch.nn.functional.pad(w, (0, missing))
        return cls(*(tma_rows(x.contiguous()) for x in (q, k_idx, w)))


def padded_heads(heads: int) -> int:
    return next((found for found in INDEX_HEADS if found >= heads), heads)


def losses(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    indexer: Indexer,
    plan: Plan,
    upstream: torch.Tensor,
    budget: int,
    query_grads: bool,
    key_grads: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
    """Return kl [Tq] and (dq, dw, dk), the gradients of sum_t upstream[t] kl[t] with respect to q_idx, w_idx and k_idx.
    dq is bf16, dw and dk are fp32; dq and dw have the padded heads of `indexer`. dq and dw are None without
    `query_grads`, and dk is None without `key_grads`. Rows of dq and dw for queries in no q tile are not written.
    budget: upper limit of the workspace in bytes, unless a single q tile needs more."""
    from dsa.kernels.training.warmup_rows_sm90 import compile_warmup_kl, compile_warmup_lse
    from dsa.kernels.training.warmup_target_sm90 import compile_warmup_target

    heads, n = indexer.q.shape[1], plan.max_key_tiles
    fp32 = {"dtype": torch.float32, "device": q.device}
    kl = torch.zeros(len(q), **fp32)
    dq, dw = (torch.empty_like(indexer.q), torch.empty_like(indexer.w)) if query_grads else (None, None)
    dk = torch.zeros(indexer.k.shape, **fp32) if key_grads else None
    if 0 in (len(q), len(k), len(plan.q_tiles)):
        return kl, tuple(None if x is None else x.zero_() for x in (dq, dw, dk))
    ctas = backends.num_sms(q.device)
    chunks = plan.chunks(n * Q_TILE * K_TILE * (4 + heads // 8), budget, ctas)
    most = max(chunk.stop - chunk.start for chunk in chunks)
    scores = torch.empty(most, n, Q_TILE, K_TILE, **fp32)
    active = torch.empty(active_shape(most, heads, n), dtype=torch.int32, device=q.device)
    kl_parts, lse_idx = torch.empty(most, n, Q_TILE, **fp32), torch.empty(len(q), **fp32)
    minus_k, rounded_w = -indexer.k, indexer.w.bfloat16()
    target = compile_warmup_target(dtype_name(q.dtype), q.shape[2])
    rows, sums = compile_warmup_lse(), compile_warmup_kl()
    q, k = tma_rows(q), tma_rows(k)
    for chunk in chunks:
        own, size = plan.q_tiles[chunk], chunk.stop - chunk.start
        key_tiles = plan.key_tiles[chunk.start : chunk.stop + 1]
        index_scores(indexer.q, minus_k, indexer.w, own, scores[:size], active[:size])
        with backends.on_device(q):
            rows(scores[:size], own, lse_idx)
            of_heads = q, k, lse, lse_idx, upstream
            target(*of_heads, own, key_tiles, scores[:size], kl_parts[:size], scale, q.shape[1] // k.shape[1], ctas)
            sums(kl_parts[:size], own, kl)
        if query_grads:
            index_query_grad(indexer.q, indexer.k, indexer.w, own, scores[:size], active[:size], dq, dw)
        if key_grads:
            index_key_grad(indexer.q, rounded_w, own, scores[:size], active[:size], dk)
    return kl, (dq, dw, dk)


def workspace(*inputs: torch.Tensor) -> int:
    """Return the budget of the workspace in bytes: LEAST_WORKSPACE, or SHARE of the inputs' bytes if that is more. So
    workspace and results together need less than twice the inputs' memory."""
    return max(LEAST_WORKSPACE, int(sum(x.numel() * x.element_size() for x in inputs) * SHARE))


def key_tiles_of(max_seqlen_k: int) -> int:
    return max(1, -(-max_seqlen_k // K_TILE))


def make_plan(sequences: Sequences, queries: int, keys: int, causal: bool) -> tuple[Plan, torch.Tensor]:
    """Return (plan, bounds [2, B + 1]). The bounds are cu_seqlens_q and cu_seqlens_k, corrected so that they ascend and
    stay inside the queries and keys."""
    from dsa.kernels.training.q_tile_plan_sm90 import compile_q_tile_plan

    cu_seqlens_q, cu_seqlens_k, *longest = sequences
    max_key_tiles, batch = key_tiles_of(longest[1]), len(cu_seqlens_q) - 1
    plan = Plan(*empty_plan(cu_seqlens_q, queries), max_key_tiles)
    ints = {"dtype": torch.int32, "device": cu_seqlens_q.device}
    bounds = (torch.empty if batch else torch.zeros)(2, batch + 1, **ints)
    if len(plan.q_tiles):
        before = torch.empty(batch, **ints)
        launch = compile_q_tile_plan()
        with backends.on_device(plan.q_tiles):
            numbers = int(causal), queries, keys, max_key_tiles
            launch(cu_seqlens_q, cu_seqlens_k, bounds, before, plan.q_tiles, plan.key_tiles, *numbers)
    return plan, bounds


def empty_plan(cu_seqlens_q: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = len(cu_seqlens_q) - 1
    count = queries // Q_TILE + batch if batch else 0
    ints = {"dtype": torch.int32, "device": cu_seqlens_q.device}
    return torch.empty(count, Q_TILE_FIELDS, **ints), torch.empty(count + 1, **ints)
