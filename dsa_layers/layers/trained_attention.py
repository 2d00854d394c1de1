"""Attention of a layer while its indexer is trained. The attention weights are the target of the indexer's loss.

The loss of a token is KL(p || softmax(I)). p is the sum of the attention weights of all heads, normalised and detached;
I are the indexer's scores. In the warm-up stage, p and I cover all keys that the token sees; in the sparse stage, the
selected keys.
Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
"""

import torch

import dsa
from dsa.reference.training.masked_softmax import kl_divergence
from dsa_layers.batch.token_batch import TokenBatch


class TrainedAttention:
    """The argument `attention` of an indexer's `loss`, and the base class of the attention in both stages. The indexer
    calls `kl` or `lightning_kl` once. The called method computes the layer's attention and returns the loss of each
    token, fp32 [T]. The loss has gradients only for the method's arguments."""

    _batch: TokenBatch
    _out: torch.Tensor | None = None

    @property
    def out(self) -> torch.Tensor:
        """The attention's output. Raises RuntimeError if neither `kl` nor `lightning_kl` was called."""
        if self._out is None:
            raise RuntimeError("indexer.loss: must call attention.kl or attention.lightning_kl, and called neither")
        return self._out

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]: the position of each token in its sequence."""
        return self._batch.positions

    def gather(self, k: torch.Tensor) -> torch.Tensor:
        """Return the rows [S, ...] of all keys that the tokens see. k [T, ...]: the rows of this batch's tokens. The
        result is k itself, unless the batch has only one rank's tokens (`IndexerStage.share`)."""
        return self._batch.gather(k)

    def lightning_kl(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the loss of the scores I[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s]). The kernels store no matrix
        of all scores. q [T, heads, dim], k [T, dim], weights fp32 [T, heads]."""
        raise NotImplementedError

    def kl(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of arbitrary scores [T, S], with the keys in the order of `gather`'s rows. Scores of keys
        that a token may not see are ignored. This method is for experiments: in the warm-up stage it stores the
        attention weights [heads, T, S]."""
        raise NotImplementedError


class WarmupAttention(TrainedAttention):
    """Causal attention to all keys of packed sequences.

    q [T, heads, d]; k [S, heads, d] and v [S, heads, v_dim] for the keys of `batch.gather`; out [T, heads, v_dim].
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


class SparseAttention(TrainedAttention):
    """Attention to the top_k keys with the largest scores.

    q [T, heads, latent + rope]: the queries, with W_UK absorbed (`DSAAttention`). kv [S, latent + rope] for the keys of
    `batch.gather`. d_v: channels of a latent. out [T, heads, d_v]. If all scores of a token are NaN, no key is
    selected, and the token's loss is NaN.
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
        # For a token without selected keys, whose row begins with -1, the op returns 0, the loss of a perfect indexer.
        # Return NaN instead.
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
        """Compute `out`, the attention to the keys `topk_indices` [T, 1, top_k]. Return its log-sum-exp [heads, T]."""
        self._out, lse = dsa.sparse_mla_attention(self._q, self._kv, topk_indices, self._scale, self._d_v)
        return lse.detach()


def _bounds(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    keyed = batch.keyed
    return keyed.cu_query_lens, keyed.cu_key_lens, max(keyed.query_lens), keyed.max_key_len


def _visible(scores: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return bool [T, S]: whether each token may see each key. Raise ValueError unless `scores` is [T, S]."""
    keyed = batch.keyed
    tokens, keys = sum(keyed.query_lens), sum(keyed.key_lens)
    if scores.shape != (tokens, keys):
        raise ValueError(f"scores: must be [{tokens}, {keys}], of each token and key, got {list(scores.shape)}")
    rows = torch.arange(keys, device=scores.device)
    starts = keyed.key_starts[:, None]
    return (rows >= starts) & (rows < starts + keyed.visible_keys[:, None])
