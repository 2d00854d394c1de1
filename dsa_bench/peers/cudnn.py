"""cuDNN-frontend's kernels for sparse attention, written in the CuTe DSL: index scores, top-k, backward."""

from collections.abc import Iterable
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers
from dsa_bench.peers.package import Library

CUDNN = Library("cuDNN-FE", ("cudnn",))


def indexer_scores(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> Peers:
    """Causal, cleaned scores of the last len(q) of len(kv[0]) tokens. A row sees one key more than the previous row."""
    return Peers.of({CUDNN: _indexer_scores}, [(q, kv, weights)])


def _indexer_scores(module: ModuleType, q, kv, weights) -> Call:
    tokens, heads, _ = q.shape
    return partial(
        module.DSA.indexer_forward_wrapper,
        q[None],
        kv[0][None, :, None],
        weights[None],
        ratio=1,
        qhead_per_kv_head=heads,
        precision="fp8",
        # The op takes scales of queries, and the position of the first query.
        q_scale=torch.ones(1, tokens, heads, device=q.device),
        k_scale=kv[1][None, :, None],
        q_causal_offsets=torch.full((1,), len(kv[0]) - tokens, dtype=torch.int32, device=q.device),
    )


def topk(inputs: Iterable[tuple[torch.Tensor, torch.Tensor, int]]) -> Peers:
    """Indices of (scores, lengths, k), with arbitrary ties and with ties to the lowest index."""
    inputs = list(inputs)
    arbitrary = Peers.of({CUDNN: partial(_topk, False)}, inputs)
    return arbitrary | Peers.of({CUDNN: partial(_topk, True)}, inputs, "{} deterministic")


def _topk(deterministic: bool, module: ModuleType, scores, lengths, k: int) -> Call:
    return partial(module.DSA.indexer_top_k_wrapper, scores, lengths, k, return_val=False, deterministic=deterministic)


def attention_backward(q, kv, indices, scale: float, sink, out, lse, dout) -> Peers:
    """(dq, dkv, dsink) of sparse attention."""
    tensors = (q, kv.squeeze(1), out, dout, lse, sink, indices.squeeze(1))
    return Peers.of({CUDNN: partial(_attention_backward, scale)}, [tensors])


def _attention_backward(scale: float, module: ModuleType, *tensors: torch.Tensor) -> Call:
    return partial(module.DSA.sparse_attention_backward_wrapper, *tensors, softmax_scale=scale)
