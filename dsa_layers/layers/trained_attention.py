"""A layer's attention while its indexer is trained: the target of the indexer's loss.

The loss is KL(p || softmax(I)), where p is the attention of all heads, summed, normalised and detached, and I are the
indexer's scores of the keys. In the warm-up these are all keys, in the sparse stage those that the scores select.
Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
"""

from typing import Protocol

import torch

import dsa
from dsa.reference.training.masked_softmax import kl_divergence
from dsa_layers.batch.token_batch import TokenBatch


class TrainedAttention(Protocol):
    """What an indexer's `loss` is given. The indexer calls `kl` or `lightning_kl`, once. The method computes the
    layer's attention, and returns each token's loss, fp32 [T], which has gradients for its arguments alone."""

    def gather(self, k: torch.Tensor) -> torch.Tensor:
        """k [T, ...], of each token -> [S, ...], of each key that they see: k itself, unless ranks share the tokens."""

    def lightning_kl(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """For the scores I[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s]), in kernels that never hold [T, T]:
        q [T, heads, dim], k [T, dim], weights fp32 [T, heads]."""

    def kl(self, scores: torch.Tensor) -> torch.Tensor:
        """For any scores [T, S], of each token t and each key s, in the order of `gather`'s rows. Scores of keys that t
        may not see are ignored. This is plain PyTorch with memory for [heads, T, S] numbers, for trying a score out."""


class _StageAttention:
    """What both stages' attention has."""

    _batch: TokenBatch
    _out: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        """The attention's output, once the loss is computed. RuntimeError before."""
        if self._out is None:
            raise RuntimeError("indexer.loss: must call attention.kl or attention.lightning_kl, and called neither")
        return self._out

    def gather(self, k: torch.Tensor) -> torch.Tensor:
        return self._batch.gather(k)


class WarmupAttention(_StageAttention):
    """Attention to all keys, and KL over all keys.

    q [T, heads, d]; k [S, heads, d], v [S, heads, v_dim] of all keys (`batch.gather`): packed sequences, causal. out
    [T, heads, v_dim], once the loss is computed.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, batch: TokenBatch
    ) -> None:
        self._q, self._k, self._v, self._scale, self._batch = q, k, v, softmax_scale, batch

    def lightning_kl(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        attention, indexer = (self._q, self._k, self._v), (q, self.gather(k), weights)
        self._out, _, kl = dsa.indexer_warmup_attention(*attention, *indexer, *_bounds(self._batch), self._scale)
        return kl

    def kl(self, scores: torch.Tensor) -> torch.Tensor:
        visible = _visible(scores, self._batch)
        logits = torch.einsum("thd,shd->hts", self._q.float(), self._k.float()) * self._scale
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        self._out = torch.einsum("hts,shd->thd", weights, self._v.float()).to(self._v.dtype)
        return kl_divergence(weights.detach().mean(0), scores.float(), visible)


class SparseAttention(_StageAttention):
    """Attention to the top_k keys of the largest scores, and KL over these.

    q [T, heads, latent + rope] absorbed, kv [S, latent + rope] of all keys (`batch.gather`); d_v: channels of a latent.
    out [T, heads, d_v], once the loss is computed. A token that no key is selected for has the loss NaN: each sees
    itself, so that its scores are no numbers.
    """

    def __init__(
        self, q: torch.Tensor, kv: torch.Tensor, softmax_scale: float, d_v: int, top_k: int, batch: TokenBatch
    ) -> None:
        self._q, self._kv, self._scale, self._d_v = q, kv[:, None], softmax_scale, d_v
        self._top_k, self._batch = top_k, batch

    def lightning_kl(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        k = self.gather(k)
        topk_indices = dsa.indexer_topk(q, k, weights, self._top_k, *_bounds(self._batch))
        lse = self._attend(topk_indices)
        attention = self._q.detach(), self._kv.detach()
        kl = dsa.sparse_indexer_loss(*attention, q, k, weights, topk_indices, self._scale, lse)
        # Without keys it is 0, which would be that of a perfect indexer. Keys come first in their rows.
        return kl.masked_fill(topk_indices[:, 0, 0] < 0, torch.nan)

    def kl(self, scores: torch.Tensor) -> torch.Tensor:
        _visible(scores, self._batch)  # checks the shape
        keyed = self._batch.keyed
        starts, lengths = keyed.key_starts, keyed.visible_keys
        own = dsa.topk_indices(scores.detach().float().contiguous(), self._top_k, starts=starts, lengths=lengths)
        selected = own >= 0
        topk_indices = torch.where(selected, own + starts[:, None], -1)
        lse = self._attend(topk_indices[:, None])
        rows = topk_indices.clamp(min=0).long()
        with torch.no_grad():
            keys = self._kv[rows, 0].float()
            logits = torch.einsum("thd,tkd->htk", self._q.float(), keys) * self._scale
            p = (logits - lse[..., None]).exp().masked_fill(~selected, 0).mean(0)
        return kl_divergence(p / p.sum(-1, keepdim=True), scores.gather(1, rows).float(), selected)

    def _attend(self, topk_indices: torch.Tensor) -> torch.Tensor:
        """Attention to the rows [T, 1, top_k]; returns the logarithm of its softmax's denominator, [heads, T]."""
        self._out, lse = dsa.sparse_mla_attention(self._q, self._kv, topk_indices, self._scale, self._d_v)
        return lse.detach()


def _bounds(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    keyed = batch.keyed
    return keyed.cu_query_lens, keyed.cu_key_lens, max(keyed.query_lens), keyed.max_key_len


def _visible(scores: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """bool [T, S]: the keys that each token may see."""
    keyed = batch.keyed
    tokens, keys = sum(keyed.query_lens), sum(keyed.key_lens)
    if scores.shape != (tokens, keys):
        raise ValueError(f"scores: must be [{tokens}, {keys}], of each token and key, got {list(scores.shape)}")
    rows = torch.arange(keys, device=scores.device)
    starts = keyed.key_starts[:, None]
    return (rows >= starts) & (rows < starts + keyed.visible_keys[:, None])
