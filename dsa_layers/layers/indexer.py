"""Indexers choose which earlier tokens a query token attends to: their protocol, and the lightning indexer."""

from typing import Literal, Protocol

import torch
from torch import nn

import dsa
from dsa.ops.indexer.fp8_mqa_logits import ACCUMULATORS
from dsa.runtime.checks import check_choice, check_dtype, check_same_dtype
from dsa_layers.arguments import flag, integer
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.key_selection import WORKSPACE, select_packed
from dsa_layers.layers.linear import BlockFP8Linear, Linear, linear_fp32, make_linear
from dsa_layers.layers.norm import LayerNorm
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS
from dsa_layers.layers.trained_attention import TrainedAttention

FP8_DIM = 128  # channels of a head, which the Hadamard transform and the pages of FP8 keys are for


class Indexer(Protocol):
    """What `DSAAttention` asks of its indexer. Any torch.nn.Module with these methods can take the lightning indexer's
    place: `DSAAttention` attends to the keys that it selects, and `IndexerStage` trains it.

    top_k    how many keys a token attends to; a token that sees fewer attends to all of them
    x        [T, hidden]: the new tokens
    qr       [T, q_lora_rank]: the latents of their queries
    cos, sin fp32 [T, rope_dim / 2]: the angles of their positions
    """

    top_k: int

    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
        *,
        paged_slots: bool = False,
        store_only: bool = False,
    ) -> torch.Tensor | None:
        """int32 [T, top_k]: the selected positions in each token's sequence, ascending, then -1: the first columns, as
        many as the token sees keys if these are at most top_k; those behind them are not read. With paged_slots the
        result has the slots of these positions in the cache, as `batch.slots_of` gives them.

        With a cache, the indexer first writes what it keeps of the new tokens to `cache.index` at `batch.slots`. What
        it has kept of all tokens, earlier ones included, is then at `batch.key_slots`: these are the rows of the keys,
        and token t sees `batch.visible_keys[t]` of them from row `batch.key_starts[t]` on. Without a cache, the rows
        are the tokens of this pass. With store_only the pass attends to all keys: the indexer writes to the cache, and
        its result is not read.
        """

    def loss(
        self, x: torch.Tensor, qr: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: TrainedAttention
    ) -> torch.Tensor:
        """fp32 [T]: each token's loss, in a pass that trains the indexer. `attention.kl` or `attention.lightning_kl`
        computes it from the indexer's scores. x and qr are detached."""


class LightningIndexer(nn.Module):
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]); each token attends to the `top_k` largest I of s <= t.

    q = wq_b(qr) per head and k = LayerNorm(wk(x)), one key for all heads, both with rope on the first or last dims;
    w = weights_proj(x) * n_heads^-0.5 * head_dim^-0.5 in fp32. If `quantize`, q and k pass the Hadamard transform and
    go to e4m3 with a power-of-two scale per head and token, as DeepSeek-V3.2 does; the queries' scales fold into w.
    workspace: bytes that a prompt's scores take at most at a time, if that is enough for one token's.
    accumulators: of a prompt's scores on Hopper, where `quantize`, as `dsa.fp8_mqa_logits` takes them; the default of
    all models, and what it costs, is `dsa_layers.layers.score_accumulators.SCORE_ACCUMULATORS`.

    `select` and `loss` are those of `Indexer`; training never quantises. Selection with `quantize` is of head_dim 128.
    Raises TypeError or ValueError that names the argument.
    Parameters: wq_b [n_heads * head_dim, q_lora_rank], wk [head_dim, hidden], k_norm.{weight,bias} [head_dim],
    weights_proj [n_heads, hidden]. Positions of equal score: the lowest win. Selection takes no gradient.
    Source: `Indexer` of DeepSeek-V3.2's inference code; the report, section 2.1.
    """

    def __init__(
        self,
        hidden: int,
        q_lora_rank: int,
        *,
        n_heads: int = 64,
        head_dim: int = 128,
        top_k: int = 2048,
        rope_interleaved: bool = False,
        rope_dims: Literal["first", "last"] = "first",
        quantize: bool = True,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
        workspace: int = WORKSPACE,
        accumulators: torch.dtype = SCORE_ACCUMULATORS,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "q_lora_rank": q_lora_rank, "n_heads": n_heads, "head_dim": head_dim}
        for name, size in (sizes | {"top_k": top_k, "workspace": workspace}).items():
            integer(name, size, at_least=1)
        flag("rope_interleaved", rope_interleaved)
        check_choice("rope_dims", rope_dims, ("first", "last"))
        flag("quantize", quantize)
        check_dtype("accumulators", accumulators, ACCUMULATORS)
        self.n_heads, self.head_dim, self.top_k = n_heads, head_dim, top_k
        self.accumulators, self.workspace = accumulators, workspace
        self.rope = {"interleaved": rope_interleaved, "dims": rope_dims}
        self.quantize = quantize
        self.wq_b = make_linear(q_lora_rank, n_heads * head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.wk = make_linear(hidden, head_dim, fp8=fp8, dtype=dtype, use_ue8m0=use_ue8m0)
        self.k_norm = LayerNorm(head_dim)
        self.weights_proj = Linear(hidden, n_heads, dtype=dtype)

    def project(
        self, x: torch.Tensor, qr: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [T, n_heads, head_dim], k [T, head_dim], w fp32 [T, n_heads]) of the scores sum_h w_h relu(q_h . k), not
        quantised, with gradients."""
        q = self.wq_b(qr).unflatten(-1, (self.n_heads, self.head_dim))
        return dsa.apply_rotary(q, cos, sin, **self.rope), self.keys(x, cos, sin), self.head_weights(x)

    def loss(
        self, x: torch.Tensor, qr: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: TrainedAttention
    ) -> torch.Tensor:
        return attention.lightning_kl(*self.project(x, qr, cos, sin))

    @torch.no_grad()
    def select(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        if cache is not None:
            raise ValueError("cache: must be None before dsa_layers.fuse, which prepares an indexer for inference")
        self.check_selects()
        q, k, weights = self.wq_b(qr).unflatten(-1, (self.n_heads, self.head_dim)), self.keys(x, cos, sin), None
        weights = self.head_weights(x)
        if self.quantize:
            q, weights = dsa.quantize_indexer_queries(q, weights, cos, sin, **self.rope)
            k = quantized_keys(k)
        else:
            q = dsa.apply_rotary(q, cos, sin, **self.rope)
        options = {"accumulators": self.accumulators, "workspace": self.workspace}
        options["key_lens"] = batch.key_lens if batch.is_decode else None
        return select_packed(q, k, weights, self.top_k, *batch.visible_ranges, **options)

    def check_selects(self) -> None:
        """Raises ValueError for a size that selection does not support."""
        if self.quantize and self.head_dim != FP8_DIM:
            raise ValueError(f"head_dim: must be {FP8_DIM} for selection with quantize=True, got {self.head_dim}")

    def keys(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """k [T, head_dim], not quantised."""
        return self.rotated_keys(self.wk(x), cos, sin)

    def rotated_keys(self, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The same from wk(x)."""
        return dsa.apply_rotary(self.k_norm(projected), cos, sin, **self.rope)

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """w fp32 [T, n_heads]."""
        return linear_fp32(x, self.weights_proj.weight, self.n_heads**-0.5 * self.head_dim**-0.5)


def quantized_keys(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """k [N, D] -> e4m3 [N, D] after the Hadamard transform, and one scale per key, fp32 [N]."""
    k, scale = dsa.per_token_cast_to_fp8(k, True, k.shape[-1], hadamard=True)
    return k, scale.squeeze(-1)


def check_indexer(indexer: object, hidden: int, q_lora_rank: int, reader: nn.Module) -> None:
    """TypeError or ValueError for what no attention layer of these sizes can have as its indexer. reader: the layer's
    own projection of x, whose dtype a lightning indexer's is."""
    if not isinstance(indexer, nn.Module) or not hasattr(indexer, "top_k") or not hasattr(indexer, "select"):
        raise TypeError(
            "indexer: must be None or a torch.nn.Module with top_k and select, as LightningIndexer is, got "
            f"{type(indexer).__name__}"
        )
    if not isinstance(indexer, LightningIndexer):
        return
    for name, size, projection in (("hidden", hidden, indexer.wk), ("q_lora_rank", q_lora_rank, indexer.wq_b)):
        if type(projection) in (Linear, BlockFP8Linear) and projection.weight.shape[1] != size:
            raise ValueError(f"indexer: its {name} must be the layer's {size}, got {projection.weight.shape[1]}")
    if type(reader) is type(indexer.wk) is Linear:
        check_same_dtype(("layer", reader.weight), indexer=indexer.wk.weight)
