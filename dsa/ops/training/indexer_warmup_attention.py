"""The indexer's warm-up: dense attention, and the loss that makes the indexer follow it, with its gradients."""

from typing import Any

import torch

from dsa.kernels.training.limits import DENSE_CHANNELS
from dsa.ops.training._packed_attention import ABSORBED, Sequences, attention_backward, attention_forward
from dsa.ops.training._uncovered_rows import fill_uncovered
from dsa.ops.training._warmup_sum import (
    Indexer,
    Plan,
    check_index_channels,
    check_index_heads,
    key_tiles_of,
    losses,
    make_plan,
    workspace,
)
from dsa.reference.training import indexer_warmup_attention as reference
from dsa.runtime.op import op

__all__ = ["indexer_warmup_attention"]

CHANNELS = *DENSE_CHANNELS, ABSORBED


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, and how far the indexer's distribution is from it.

    A_h[t, s] = softmax_s(softmax_scale q_h[t] . k[s]);   out_h[t] = sum_s A_h[t, s] v[s]
    I[t, s] = sum_j w_idx[t, j] relu(q_idx_j[t] . k_idx[s])
    kl[t] = KL(p[t] || softmax_s(I[t])), p[t] = sum_h A_h[t] divided by its sum over s

    q             [Tq, H, d]; k [Tk, Hk, d], v [Tk, Hk, dv], H a multiple of Hk: head h attends to head h // (H / Hk)
                  k and v in q's dtype
    q_idx         [Tq, Hi, di] and k_idx [Tk, di] in q's dtype; w_idx [Tq, Hi] in that or fp32, of any sign
    cu_seqlens_q  int32 [B + 1], where sequences begin, from 0 to Tq; cu_seqlens_k likewise, to Tk
    max_seqlen_*  at least the length of the longest sequence. On Hopper a sequence with more keys has NaN losses, and
                  in a longer sequence the rows after this length have gradients of 0 in q, k and v
    causal        a sequence's last query sees all its keys, and every other query one key fewer than the next

    Returns out [Tq, H, dv] in q's dtype, lse [H, Tq] fp32 (natural log) and kl fp32 [Tq]. A query without keys has out
    0, lse +inf and kl 0. Gradients of out reach q, k and v; those of kl reach q_idx, k_idx and w_idx only.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and where the reference runs, for
    cu_seqlens that do not ascend from 0 to the end. The kernels replace a boundary that is outside the tensor, or below
    an earlier one, by the boundary before it; rows that are in no sequence are queries without keys, with gradients of
    0.
    On Hopper: bf16, w_idx also fp32; other dtypes run the PyTorch reference, with a warning. (d, dv) is (64, 64), (128,
    128), (192, 128) or (576, 512); the last one has Hk = 1 and v a view of k, and k's gradient then includes v's. di is
    64 or 128. Up to 64 index heads (8, 16, 32 and 64 without padding).
    No matrix of all queries by all keys is stored: the workspace holds a chunk of queries by all keys, at most 15/16 of
    the inputs or 192 MiB, whichever is more. The forward pass computes the indexer's gradients together with the loss,
    as if all tokens had the same upstream gradient, and keeps them. The backward pass scales them, and computes k_idx's
    gradient again if the upstream gradients differ. After `kl.sum()` the host knows that they are equal, after
    `kl.mean()` the device finds out. lse has no gradient, and nothing has a second gradient. The gradients of q, k and
    v are those of PyTorch's flash attention, or at (576, 512) those of `sparse_mla_attention`, and are summed in no
    fixed order; everything else is deterministic. At (576, 512) the order is fixed if
    torch.are_deterministic_algorithms_enabled() when the gradient is computed, with 2304 max_seqlen_k bytes more for
    each multiprocessor. CUDA-graph safe, no host synchronisation.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
    """
    tensors = q, k, v, q_idx, k_idx, w_idx, cu_seqlens_q, cu_seqlens_k
    return _indexer_warmup_attention(*tensors, max_seqlen_q, max_seqlen_k, softmax_scale, causal)


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
        sequences: Sequences,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rest = sequences[2:], scale, causal
        plan, sequences = make_plan(sequences, len(q), len(k), causal)  # with bounds that are inside the tensors
        out, lse = attention_forward(q, k, v, sequences, scale, causal)
        ctx.mark_non_differentiable(lse)
        bounds = sequences[:2]
        wants = any(ctx.needs_input_grad[3:6])
        ones = q.new_ones(len(q), dtype=torch.float32)
        indexer = Indexer.of(q_idx, k_idx, w_idx)
        budget = workspace(q, k, v, q_idx, k_idx, w_idx)
        kl, grads = losses(q, k, lse, scale, indexer, plan, ones, budget, wants, wants)
        if wants:
            dq, dw, _ = grads
            fill_uncovered(bounds[0], (dq, 0.0), (dw, 0.0))
        saved = q, k, v, q_idx, k_idx, w_idx, out, lse, *bounds, plan.q_tiles, plan.key_tiles
        ctx.save_for_backward(*saved, *(grads if wants else ()))
        return out, lse, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, _: None, grad_kl: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, q_idx, k_idx, w_idx, out, lse, *bounds, q_tiles, key_tiles = ctx.saved_tensors[:12]
        longest, scale, causal = ctx.rest
        of_attention = None, None, None
        if grad_out is not None and any(ctx.needs_input_grad[:3]):
            of_attention = attention_backward(grad_out, q, k, v, out, lse, (*bounds, *longest), scale, causal)
        dq_idx = dk_idx = dw_idx = None
        if grad_kl is not None and any(ctx.needs_input_grad[3:6]) and len(q):
            dq, dw, dk = ctx.saved_tensors[12:]
            heads = q_idx.shape[1]
            if ctx.needs_input_grad[3]:
                dq_idx = _scaled(dq[:, :heads], grad_kl[:, None, None], q_idx.dtype)
            if ctx.needs_input_grad[5]:
                dw_idx = _scaled(dw[:, :heads], grad_kl[:, None], w_idx.dtype)
            if ctx.needs_input_grad[4]:
                # What was kept is the sum over tokens of weight 1: right for equal weights, as `kl.sum()` gives them.
                dk_idx = _scaled(dk, grad_kl[0], k_idx.dtype)
                if grad_kl.stride(0) != 0:
                    # Whether they differ only the device knows. A plan of no work costs the launches alone.
                    differ = (grad_kl != grad_kl[0]).any()
                    plan = Plan(q_tiles, key_tiles, key_tiles_of(longest[1])).only_if(differ)
                    indexer, upstream = Indexer.of(q_idx, k_idx, w_idx), grad_kl.float().contiguous()
                    budget = workspace(q, k, v, q_idx, k_idx, w_idx)
                    _, again = losses(q, k, lse, scale, indexer, plan, upstream, budget, False, True)
                    dk_idx = torch.where(differ, again[2].to(k_idx.dtype), dk_idx)
        return *of_attention, dq_idx, dk_idx, dw_idx, None, None, None


def _scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * factor, rounded once, in one pass."""
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))


def _check_limits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_idx: torch.Tensor, softmax_scale: float) -> None:
    if (q.shape[2], v.shape[2]) not in CHANNELS:
        raise ValueError(
            f"q, v: the kernel takes channels (d, dv) of {', '.join(map(str, CHANNELS))}, got "
            f"{(q.shape[2], v.shape[2])}"
        )
    check_index_channels(q_idx)
    check_index_heads(q_idx)
    if not 0 < softmax_scale < float("inf"):
        raise ValueError(f"softmax_scale: the kernel takes a positive number, got {softmax_scale}")
    if (q.shape[2], v.shape[2]) == ABSORBED:
        if k.shape[1] != 1:
            raise ValueError(f"k: the kernel takes one head of {ABSORBED[0]} channels, got {k.shape[1]}")


@op(
    arguments=reference.INDEXER_WARMUP_ATTENTION,
    reference=reference.indexer_warmup_attention,
    limits=_check_limits,
    autograd=True,
    dtypes=(torch.bfloat16,),
)
def _indexer_warmup_attention(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Whose memory v is, a remembered call does not say.
    if (q.shape[2], v.shape[2]) == ABSORBED:
        if len(v) and (v.data_ptr() != k.data_ptr() or v.stride(0) != k.stride(0)):
            raise ValueError(f"v: the kernel takes k[..., :{ABSORBED[1]}] for keys of {ABSORBED[0]} channels")
    sequences = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k
    return _Warmup.apply(q, k, v, q_idx, k_idx, w_idx, sequences, float(softmax_scale), causal)
