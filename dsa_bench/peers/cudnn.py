"""cuDNN-frontend's kernels for sparse attention, written in the CuTe DSL: index scores, top-k, backward."""

from collections.abc import Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers, peer
from dsa_bench.peers.package import Library

CUDNN = Library("cuDNN-FE", ("cudnn",))


@peer(CUDNN)
def indexer_scores(module: ModuleType, q, kv, weights) -> Call:
    """Return calls that compute causal scores from inputs (q, kv, weights), with -inf for keys that a query does not
    see. Query i sees the first len(kv[0]) - len(q) + i + 1 keys."""
    tokens, heads, _ = q.shape
    return partial(
        module.DSA.indexer_forward_wrapper,
        q[None],
        kv[0][None, :, None],
        weights[None],
        ratio=1,
        qhead_per_kv_head=heads,
        precision="fp8",
        # Unlike ours, the op has scales of queries and the position of the first query as arguments.
        q_scale=torch.ones(1, tokens, heads, device=q.device),
        k_scale=kv[1][None, :, None],
        q_causal_offsets=torch.full((1,), len(kv[0]) - tokens, dtype=torch.int32, device=q.device),
    )


def topk(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, int]]) -> Peers:
    """Return calls of two variants that select k indices per row from inputs (scores, lengths, k). One breaks ties
    arbitrarily, the other selects the lowest of tied indices."""
    inputs = list(inputs)
    return Peers.of({CUDNN: partial(_topk, False)}, inputs) | Peers.of(
        {CUDNN: partial(_topk, True)}, inputs, "{} deterministic"
    )


def _topk(deterministic: bool, module: ModuleType, scores, lengths, k: int) -> Call:
    return partial(module.DSA.indexer_top_k_wrapper, scores, lengths, k, return_val=False, deterministic=deterministic)


@peer(CUDNN)
def attention_backward(module: ModuleType, q, kv, indices, scale: float, sink, out, lse, dout) -> Call:
    """Return calls that compute the gradients (dq, dkv, dsink) of sparse attention from inputs (q, kv, indices, scale,
    sink, out, lse, dout)."""
    return partial(
        module.DSA.sparse_attention_backward_wrapper,
        *(q, kv.squeeze(1), out, dout, lse, sink, indices.squeeze(1)),
        softmax_scale=scale,
    )
