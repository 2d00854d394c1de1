"""The indexer's warm-up: dense attention, and the loss that makes the indexer follow it, with its gradients."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._indexer_gradient import HEADS, active_shape, index_key_grad, index_query_grad, index_scores
from dsa.ops._kernel_arguments import check_same_device, dtype_name
from dsa.ops._packed_attention import ABSORBED, attention_backward, attention_forward
from reference import indexer_training as reference

DIMS = (64, 64), (128, 128), (192, 128), (576, 512)
INDEX_DIMS = 64, 128
ROWS = 128  # queries of a slot, and keys of a tile
LEAST_WORKSPACE = 192 << 20  # bytes


def indexer_warmup_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_idx: torch.Tensor,
    k_idx: torch.Tensor,
    w_idx: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    target: str = "sum",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, and how far the indexer's distribution is from it.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    "sum": kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s: DeepSeek-V3.2's loss
    "per_head": kl[t, h] = KL(A_h[t] || softmax_s(w_idx[t, h] relu(q_idx_h[t] . k_idx[s]))), for as many index heads

    q             [Tq, H, d]; k [Tk, Hk, d], v [Tk, Hk, dv], H a multiple of Hk: head h attends to head h // (H / Hk)
    q_idx         [Tq, Hi, di]; k_idx [Tk, di]; w_idx [Tq, Hi], of any sign
    cu_seqlens_q  int32 [B + 1], where sequences begin, from 0 to Tq; cu_seqlens_k likewise, to Tk
    max_seqlen_*  no sequence is longer; the losses of one that is are NaN
    causal        a sequence's last query sees all its keys, each one before it one fewer

    Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] fp32 (natural log; on Hopper without a gradient) and kl fp32 [Tq] or [Tq, H]. A
    query without keys has out 0, lse +inf and kl 0. Gradients of out reach q, k and v; those of kl reach q_idx, k_idx
    and w_idx only. Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: bf16 (w_idx also fp32); (d, dv) = (64, 64), (128, 128), (192, 128) or (576, 512), the last with Hk = 1, and
    v a view of k, whose gradient then has v's in it; di 64 or 128; up to 64 index heads (8, 16, 32 and 64 without padding), "per_head" up to 128. No S x S tensor: the
    workspace is a chunk of queries by all keys. The indexer's gradients are computed with the loss, for equal weights
    of all tokens, and kept; a backward pass scales them, and computes k_idx's again if the weights differ (`kl.sum()` says that
    they do not, `kl.mean()` lets the device find out). Other dtypes run the PyTorch reference, with a warning on Hopper. Deterministic but for k's and v's gradients. CUDA-graph safe, no
    host synchronisation.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1; "per_head" is tl-dsa-warmup-lightning-indexer's.
    """
    tensors = q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k
    rest = max_seqlen_q, max_seqlen_k, softmax_scale, causal, target
    reference.check_warmup(*tensors, target)
    if q.dtype != torch.bfloat16:
        backends.note_reference_only(f"indexer_warmup_attention in {dtype_name(q.dtype)}", q)
        return reference.indexer_warmup_attention(*tensors, *rest)
    if not backends.runs_kernel("indexer_warmup_attention", q):
        return reference.indexer_warmup_attention(*tensors, *rest)
    _check_kernel_takes(*tensors, softmax_scale)
    return _Warmup.apply(*tensors, *rest)


@dataclass(frozen=True)
class _Plan:
    """Slots of the packed queries, and the key tiles before each. Nothing of it is known to the host."""

    slots: torch.Tensor
    tiles: torch.Tensor
    most_tiles: int

    def chunks(self, bytes_of_slot: int, budget: int) -> list[slice]:
        """Ranges of slots, as even as they can be."""
        count = len(self.slots)
        each = max(1, budget // max(bytes_of_slot, 1))
        pieces = -(-count // each)
        each = -(-count // pieces)
        return [slice(i, min(i + each, count)) for i in range(0, count, each)]

    def only_if(self, wanted: torch.Tensor) -> "_Plan":
        """The same plan, or one of no work if `wanted`, a bool on the device, is false."""
        return _Plan(self.slots * wanted, self.tiles * wanted, self.most_tiles)


@dataclass(frozen=True)
class _Indexer:
    """The indexer's tensors as the kernels take them, index heads padded to a number that they take."""

    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor

    @classmethod
    def of(cls, q_idx: torch.Tensor, k_idx: torch.Tensor, w_idx: torch.Tensor) -> "_Indexer":
        missing = next(heads for heads in HEADS if heads >= q_idx.shape[1]) - q_idx.shape[1]
        q, w = q_idx.contiguous(), w_idx.float().contiguous()
        if missing:
            q = torch.nn.functional.pad(q, (0, 0, 0, missing))
            w = torch.nn.functional.pad(w, (0, missing))
        return cls(q, k_idx.contiguous(), w)


class _Warmup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_idx: torch.Tensor,
        k_idx: torch.Tensor,
        w_idx: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        target: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = attention_forward(q, k, v, sequences, softmax_scale, causal)
        plan = _plan(cu_seqlens_q, cu_seqlens_k, max_seqlen_k, len(q), len(k), causal)
        indexer = _Indexer.of(q_idx, k_idx, w_idx)
        wants = any(ctx.needs_input_grad[3:6])
        ones = q.new_ones(len(q), dtype=torch.float32)
        kl, grads = _losses(q, k, lse, softmax_scale, indexer, plan, ones, wants, wants)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(
            *(q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k, out, lse, plan.slots, plan.tiles),
            *(grads if wants else ()),
        )
        ctx.rest = max_seqlen_q, max_seqlen_k, softmax_scale, causal
        return out, lse, kl

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, _: None, grad_kl: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, q_idx, k_idx, w_idx, cu_q, cu_k, out, lse, slots, tiles, *kept = ctx.saved_tensors
        max_q, max_k, scale, causal = ctx.rest
        dq = dk = dv = dq_idx = dk_idx = dw_idx = None
        if grad_out is not None and any(ctx.needs_input_grad[:3]):
            sequences = cu_q, cu_k, max_q, max_k
            dq, dk, dv = attention_backward(grad_out, q, k, v, out, lse, sequences, scale, causal)
        if grad_kl is not None and any(ctx.needs_input_grad[3:6]) and len(q):
            heads = q_idx.shape[1]
            if ctx.needs_input_grad[3]:
                dq_idx = _scaled(kept[0][:, :heads], grad_kl[:, None, None], q_idx.dtype)
            if ctx.needs_input_grad[5]:
                dw_idx = _scaled(kept[1][:, :heads], grad_kl[:, None], w_idx.dtype)
            if ctx.needs_input_grad[4]:
                # What was kept is the sum over tokens of weight 1: right for equal weights, as `kl.sum()` gives them.
                dk_idx = _scaled(kept[2], grad_kl[0], k_idx.dtype)
                if grad_kl.stride(0) != 0:
                    # Whether they differ only the device knows. A plan of no work costs the launches alone.
                    differ = (grad_kl != grad_kl[0]).any()
                    plan = _Plan(slots, tiles, _tiles(max_k)).only_if(differ)
                    indexer = _Indexer.of(q_idx, k_idx, w_idx)
                    _, again = _losses(q, k, lse, scale, indexer, plan, grad_kl.float().contiguous(), False, True)
                    dk_idx = torch.where(differ, again[2].to(k_idx.dtype), dk_idx)
        return dq, dk, dv, dq_idx, dk_idx, dw_idx, *[None] * 7


def _scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * factor, rounded once, in one pass."""
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _losses(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    indexer: _Indexer,
    plan: _Plan,
    upstream: torch.Tensor,
    query_grads: bool,
    key_grads: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
    """kl [Tq] and the gradients of sum_t upstream[t] kl[t]: of q_idx bf16, of w_idx and k_idx fp32."""
    heads, n = indexer.q.shape[1], plan.most_tiles
    fp32 = {"dtype": torch.float32, "device": q.device}
    kl = torch.zeros(len(q), **fp32)
    dq, dw = (torch.empty_like(indexer.q), torch.empty_like(indexer.w)) if query_grads else (None, None)
    dk = torch.zeros(indexer.k.shape, **fp32) if key_grads else None
    if 0 in (len(q), len(k), len(plan.slots), n):
        return kl, tuple(None if x is None else x.zero_() for x in (dq, dw, dk))
    chunks = plan.chunks(n * ROWS * ROWS * (4 + heads // 8), max(LEAST_WORKSPACE, _share_of_inputs(q, k, indexer)))
    slots = chunks[0].stop
    scores = torch.empty(slots, n, ROWS, ROWS, **fp32)
    active = torch.empty(active_shape(slots, heads, n), dtype=torch.int32, device=q.device)
    kl_parts, lse_idx = torch.empty(slots, n, ROWS, **fp32), torch.empty(len(q), **fp32)
    minus_k = -indexer.k
    ctas = backends.num_sms(q.device)
    target, rows, sums = _kernels(q.dtype, q.shape[2])
    q, k = (rows_at_16_bytes(x) if rows_at_16_bytes(x) is not None else x.contiguous() for x in (q, k))
    for chunk in chunks:
        own, size = plan.slots[chunk], chunk.stop - chunk.start
        tiles = plan.tiles[chunk.start : chunk.stop + 1]
        index_scores(indexer.q, minus_k, indexer.w, own, scores[:size], active[:size])
        with backends.on_device(q):
            rows(scores[:size], own, lse_idx)
            of_heads = q, k, lse, lse_idx, upstream
            target(*of_heads, own, tiles, scores[:size], kl_parts[:size], scale, q.shape[1] // k.shape[1], ctas)
            sums(kl_parts[:size], own, kl)
        if query_grads:
            index_query_grad(indexer.q, indexer.k, indexer.w, own, scores[:size], active[:size], dq, dw)
        if key_grads:
            index_key_grad(indexer.q, indexer.w, own, scores[:size], active[:size], dk)
    return kl, (dq, dw, dk)


def _share_of_inputs(q: torch.Tensor, k: torch.Tensor, indexer: _Indexer) -> int:
    """Half of their bytes: with more tiles a chunk the multiprocessors have more even shares."""
    return sum(x.numel() * x.element_size() for x in (q, k, indexer.q)) // 2


def _tiles(max_seqlen_k: int) -> int:
    return -(-max_seqlen_k // ROWS)


def _plan(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_k: int, queries: int, keys: int, causal: bool
) -> _Plan:
    batch = len(cu_seqlens_q) - 1
    count = queries // ROWS + batch if batch else 0
    ints = {"dtype": torch.int32, "device": cu_seqlens_q.device}
    slots, tiles = torch.empty(count, 8, **ints), torch.empty(count + 1, **ints)
    if count:
        before = torch.empty(batch, **ints)
        with backends.on_device(slots):
            _plan_kernel()(
                *(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), before, slots, tiles),
                *(int(causal), queries, keys, _tiles(max_seqlen_k)),
            )
    return _Plan(slots, tiles, _tiles(max_seqlen_k))


@functools.cache
def _plan_kernel() -> Callable[..., None]:
    from dsa.kernels.query_slots_sm90 import compile_query_slots

    return compile_query_slots()


@functools.cache
def _kernels(dtype: torch.dtype, dim: int) -> tuple[Callable[..., None], ...]:
    from dsa.kernels import warmup_rows_sm90 as rows
    from dsa.kernels import warmup_target_sm90 as target

    return target.compile_warmup_target(dtype_name(dtype), dim), rows.compile_warmup_lse(), rows.compile_warmup_kl()


def _check_kernel_takes(q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k, softmax_scale) -> None:
    bf16 = {"k": k, "v": v, "q_idx": q_idx, "k_idx": k_idx}
    for name, x in bf16.items():
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{name}: the Hopper kernel takes q's dtype bfloat16, got {dtype_name(x.dtype)}")
    if w_idx.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"w_idx: the Hopper kernel takes bfloat16 or float32, got {dtype_name(w_idx.dtype)}")
    if (q.shape[2], v.shape[2]) not in DIMS:
        raise ValueError(
            f"q, v: the Hopper kernel takes channels (d, dv) of {', '.join(map(str, DIMS))}, got "
            f"{(q.shape[2], v.shape[2])}"
        )
    if q_idx.shape[2] not in INDEX_DIMS:
        raise ValueError(f"q_idx: the Hopper kernel takes di of 64 or 128, got {q_idx.shape[2]}")
    if not 1 <= q_idx.shape[1] <= HEADS[-1]:
        raise ValueError(f"q_idx: the Hopper kernel takes 1 to {HEADS[-1]} heads, got {q_idx.shape[1]}")
    if not 0 < softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale: the Hopper kernel takes a positive number, got {softmax_scale}")
    if (q.shape[2], v.shape[2]) == ABSORBED:
        if k.shape[1] != 1:
            raise ValueError(f"k: the Hopper kernel takes one head of {ABSORBED[0]} channels, got {k.shape[1]}")
        if len(v) and (v.data_ptr() != k.data_ptr() or v.stride(0) != k.stride(0)):
            raise ValueError(f"v: the Hopper kernel takes k[..., :{ABSORBED[1]}] for keys of {ABSORBED[0]} channels")
    others = {"w_idx": w_idx, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_same_device(("q", q), **bf16, **others)
