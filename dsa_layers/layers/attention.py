"""Multi-head latent attention with DeepSeek Sparse Attention's token selection."""

from typing import Any, Literal

import torch
from torch import nn

import dsa
from dsa.runtime.checks import check_choice, check_flag, check_number, check_same_dtype, integer
from dsa_layers.batch import packing
from dsa_layers.batch.token_batch import TokenBatch, check_batch, check_no_cache, check_tokens
from dsa_layers.cache.kv_cache import LatentStore, read_latents
from dsa_layers.layers.causal_attention import causal_attention
from dsa_layers.layers.indexer import Indexer, LightningIndexer
from dsa_layers.layers.linear import BlockFP8Linear, Linear, check_rows, make_linear, weight_of
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.position_scaling import PositionScaling
from dsa_layers.layers.rope import Angles
from dsa_layers.layers.trained_attention import SparseAttention, WarmupAttention

Gate = Literal["x", "heads", "queries"]


class DSAAttention(nn.Module):
    """Multi-head latent attention (MLA) over the keys that an indexer selects. If every sequence has at most top_k
    keys, the layer attends to all keys.

    Each token x has queries q = W_UQ RMSNorm(W_DQ x), a latent c = RMSNorm(W_DKV x) [kv_lora_rank] and one rope key
    k_pe [rope_dim]. Rope rotates k_pe and the last rope_dim channels of each query head. Per head
    k_h = [W_UK_h c | k_pe], v_h = W_UV_h c, o_h = sum_s softmax_s(softmax_scale * q_h . k_h,s) v_h,s.
    With q_lora_rank=None, q = W_UQ x. With rope=False, queries and keys have zeros in the rope channels. With
    `position_scaling`, q is scaled by a learned function of the token's position (`PositionScaling`). With
    `scale_latents`, the RMSNorm of a latent of rank r also multiplies by sqrt(hidden / r). With `norm_rope_keys`, an
    RMSNorm normalises k_pe before rope.
    Attention to all keys computes k_h and v_h. Attention to selected keys multiplies the queries by W_UK and the
    outputs by W_UV (absorption), so that all heads read the same key [c | k_pe].
    A layer without an indexer (IndexShare) attends to the keys that the nearest earlier layer with an indexer selected.
    y = W_O [o_h]. With a gate, o_h is first multiplied by sigmoid(g_h). gate="x": g = W_G x, v_dim values per head.
    gate="heads": g = W_G x, one value per head. gate="queries": W_UQ reads [RMSNorm(W_DQ x) | W_DQ x] and also returns
    g_h. With `sinks`, the softmax denominator of head h has one more term, e^{sink_h}. With `shares_latents`, the layer
    has no W_DKV and attends to the latents of an earlier layer.

    forward(x [T, hidden], cos, sin fp32 [T, rope_dim / 2], batch, cache=None, selected=None)
        -> (y [T, hidden], selected)
    batch: complete packed sequences. selected: int32 [T, top_k], or more columns with a `PooledIndexer`: the row
    numbers in x of the keys that the layer attended to, padded with -1. None if the layer attended to all keys, or if a
    `dsa_layers.IndexerStage` trains the indexer. A layer without an indexer takes the `selected` that the previous
    layer returned.
    cache: None, or the `LatentStore` of a group of layers that share latents.
    This class supports gradients but no paged cache; `dsa_layers.fuse` converts it to `PagedAttention`, which supports
    a cache but no gradients.
    softmax_scale: None for (nope_dim + rope_dim)^-0.5. eps: of the RMSNorms. fp8, dtype, use_ue8m0: see `make_linear`.
    Parameters have the checkpoint's names: q_a_proj (W_DQ), q_a_layernorm, q_b_proj (W_UQ; per head: nope rows, rope
    rows), kv_a_proj_with_mqa (W_DKV, then rows for k_pe), kv_a_layernorm, kv_b_proj (per head: W_UK, W_UV), o_proj
    (W_O), indexer. With gate="x" or "heads": gate_proj (W_G) [heads * v_dim or heads, hidden], never in FP8. With
    gate="queries", the rows of g_h follow the rope rows of each head in q_b_proj. With `norm_rope_keys`:
    k_rope_only_layernorm. With `sinks`: sinks, fp32 [heads]. With `position_scaling`:
    softmax_scaling.{scale,bias}. With rope=False, q_b_proj and kv_a_proj_with_mqa have no rope rows. With
    q_lora_rank=None there are no q_a_proj and q_a_layernorm, and with `shares_latents` no kv_a_proj_with_mqa and
    kv_a_layernorm.
    The constructor raises TypeError or ValueError, which names the argument, for wrong sizes and options. `forward`
    raises them for a wrong x, batch or cache.
    Source: `MLA` of DeepSeek-V3.2's inference code; arXiv 2512.02556, section 2.1. IndexShare: arXiv 2603.12201.
    """

    def __init__(
        self,
        hidden: int,
        n_heads: int,
        indexer: Indexer | None,
        *,
        q_lora_rank: int | None = 1536,
        kv_lora_rank: int = 512,
        nope_dim: int = 128,
        rope_dim: int = 64,
        v_dim: int = 128,
        softmax_scale: float | None = None,
        gate: Gate | None = None,
        sinks: bool = False,
        rope: bool = True,
        position_scaling: bool = False,
        shares_latents: bool = False,
        scale_latents: bool = False,
        norm_rope_keys: bool = False,
        eps: float = 1e-6,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "n_heads": n_heads, "kv_lora_rank": kv_lora_rank}
        sizes |= {} if q_lora_rank is None else {"q_lora_rank": q_lora_rank}
        for name, size in (sizes | {"nope_dim": nope_dim, "rope_dim": rope_dim, "v_dim": v_dim}).items():
            integer(name, size, at_least=1)
        if rope_dim % 2:
            raise ValueError(f"rope_dim: must be even, got {rope_dim}")
        check_number("softmax_scale", 1.0 if softmax_scale is None else softmax_scale)
        check_number("eps", eps, 0)
        if gate is not None:
            check_choice("gate", gate, ("x", "heads", "queries"))
            if gate == "queries" and q_lora_rank is None:
                raise ValueError("gate: must be None, 'x' or 'heads' with q_lora_rank=None, got 'queries'")
        flags = {"sinks": sinks, "rope": rope, "position_scaling": position_scaling, "shares_latents": shares_latents}
        flags |= {"scale_latents": scale_latents, "norm_rope_keys": norm_rope_keys}
        for name, flag in flags.items():
            check_flag(name, flag)
        self.n_heads, self.q_lora_rank, self.kv_lora_rank = n_heads, q_lora_rank, kv_lora_rank
        self.nope_dim, self.rope_dim, self.v_dim = nope_dim, rope_dim, v_dim
        self.softmax_scale = (nope_dim + rope_dim) ** -0.5 if softmax_scale is None else softmax_scale
        self.gate, self.has_rope = gate, rope
        options = {"fp8": fp8, "dtype": dtype, "use_ue8m0": use_ue8m0}
        self.q_a_proj = self.q_a_layernorm = self.kv_a_proj_with_mqa = self.kv_a_layernorm = None
        if q_lora_rank is not None:
            self.q_a_proj = make_linear(hidden, q_lora_rank, **options)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps, (hidden / q_lora_rank) ** 0.5 if scale_latents else 1.0)
        rope_rows = rope_dim if rope else 0
        q_inputs, q_outputs = hidden if q_lora_rank is None else q_lora_rank, nope_dim + rope_rows
        if gate == "queries":
            q_inputs, q_outputs = 2 * q_lora_rank, q_outputs + v_dim
        self.q_b_proj = make_linear(q_inputs, n_heads * q_outputs, **options)
        if not shares_latents:
            self.kv_a_proj_with_mqa = make_linear(hidden, kv_lora_rank + rope_rows, **options)
            self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps, (hidden / kv_lora_rank) ** 0.5 if scale_latents else 1.0)
        self.kv_b_proj = make_linear(kv_lora_rank, n_heads * (nope_dim + v_dim), **options)
        self.o_proj = make_linear(n_heads * v_dim, hidden, **options)
        self.k_rope_only_layernorm = RMSNorm(rope_dim, eps) if norm_rope_keys else None
        gate_rows = {"x": n_heads * v_dim, "heads": n_heads}.get(gate)
        self.register_module("gate_proj", gate_rows and Linear(hidden, gate_rows, dtype=dtype))
        self.register_parameter("sinks", nn.Parameter(torch.zeros(n_heads, dtype=torch.float32)) if sinks else None)
        self.register_module("softmax_scaling", PositionScaling(n_heads) if position_scaling else None)
        if indexer is not None:
            _check_indexer(indexer, hidden, q_lora_rank or hidden, self.q_a_proj or self.q_b_proj)
        self.indexer = indexer
        # The `IndexerStage` that currently trains the indexer, or None.
        self.indexer_stage: Any = None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: LatentStore | None = None,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.check_pass(x, batch)
        check_tokens(x, batch.positions)
        check_no_cache(None if isinstance(cache, LatentStore) else cache, batch)
        rope = cos, sin
        q, qr, gate = self._queries(x, batch)
        q = self._rotate(q, rope)
        if self.kv_a_proj_with_mqa is None:
            kv = read_latents(cache, len(x), self.kv_lora_rank + self.rope_dim)
        else:
            kv = self._norm_and_rotate(self._key_inputs(self.kv_a_proj_with_mqa(x)), rope)
            if cache is not None:
                cache.latents = kv
        if self.indexer_stage is not None:
            values = self._train(x, qr, rope, q, batch.gather(kv), batch)
            return self._output(values, gate), None
        if self.indexer is not None:
            selected = self._select(x, qr, rope, batch)
        return self._output(self._attend(q, kv, selected, batch), gate), selected

    def check_pass(self, x: torch.Tensor, batch: TokenBatch) -> None:
        """Raise TypeError or ValueError if x does not fit the weights, or if `check_batch` rejects `batch`."""
        check_rows("x", x, self.q_a_proj or self.q_b_proj)
        check_batch(batch, whole=self.indexer_stage is None)

    def selectable(self, batch: TokenBatch) -> TokenBatch:
        """Return the view of the keys that the indexer selects from: the batch itself, because each token is a key."""
        return batch

    def _queries(self, x: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (q [T, heads, nope + rope] before rope, latents qr [T, q_lora_rank], gate g [T, heads, v_dim or 1] or
        None). qr is x if q_lora_rank is None."""
        qr = inputs = x
        if self.q_a_proj is not None:
            latent = self.q_a_proj(x)
            qr = self.q_a_layernorm(latent)
            inputs = torch.cat((qr, latent), -1) if self.gate == "queries" else qr
        q, gate = self.split_gate(self.q_b_proj(inputs).unflatten(-1, (self.n_heads, -1)), batch.positions)
        if self.gate_proj is not None:
            gate = self.gate_proj(x).unflatten(-1, (self.n_heads, -1))
        return q, qr, gate

    def split_gate(self, q: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split the outputs of q_b_proj, [T, heads, ...]. Return (q [T, heads, nope + rope], g). With
        `position_scaling`, the returned q is scaled. g is None unless gate="queries". positions: int64 [T]."""
        gate = None
        if self.gate == "queries":
            q, gate = q.split((q.shape[-1] - self.v_dim, self.v_dim), -1)
        if self.softmax_scaling is not None:
            q = self.softmax_scaling(q, positions)
        return self._with_rope_channels(q), gate

    def _with_rope_channels(self, x: torch.Tensor) -> torch.Tensor:
        """Return x. In a layer without rope, append rope_dim channels of zeros."""
        return x if self.has_rope else nn.functional.pad(x, (0, self.rope_dim))

    def _key_inputs(self, kv: torch.Tensor) -> torch.Tensor:
        """Return the argument of `_norm_and_rotate`. kv: the output of kv_a_proj_with_mqa."""
        kv = self._with_rope_channels(kv)
        if self.k_rope_only_layernorm is None:
            return kv
        latent, k_pe = kv.split((self.kv_lora_rank, self.rope_dim), -1)
        return torch.cat((latent, self.k_rope_only_layernorm(k_pe)), -1)

    def _output(self, values: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Apply the gate to the attention output [T, heads, v_dim], and return y [T, hidden]."""
        if gate is not None:
            values = (values * gate.float().sigmoid()).to(values.dtype)
        return self.o_proj(values.flatten(-2))

    def _rotate(self, x: torch.Tensor, rope: Angles) -> torch.Tensor:
        return dsa.apply_rotary(x, *rope, interleaved=True, dims="last")

    def _norm_and_rotate(self, kv: torch.Tensor, rope: Angles) -> torch.Tensor:
        """Return kv [T, latent + rope] with normalised latents and rotated rope keys. kv: the result of
        `_key_inputs`."""
        latent, k_pe = kv.split((self.kv_lora_rank, self.rope_dim), -1)
        return self._rotate(torch.cat((self.kv_a_layernorm(latent), k_pe), -1), rope)

    def _select(self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, batch: TokenBatch) -> torch.Tensor | None:
        """Return int32 [T, top_k]: the rows of kv that each token attends to, padded with -1. Return None if no
        sequence has more than top_k keys: then each token attends to all keys that it sees."""
        if batch.max_key_len <= self.indexer.top_k:
            return None
        positions = self.indexer.select(x, qr, rope, batch)
        return packing.packed_rows(positions, batch.key_starts, len(batch.key_lens))

    def _attend(
        self, q: torch.Tensor, kv: torch.Tensor, selected: torch.Tensor | None, batch: TokenBatch
    ) -> torch.Tensor:
        """Compute attention: q [T, heads, nope + rope], kv [T, latent + rope] -> o [T, heads, v_dim]."""
        if selected is None:
            return causal_attention(q, *self._keys_and_values(kv), batch, self.softmax_scale, self.sinks)
        arguments = self._absorb(q), kv[:, None], selected[:, None], self.softmax_scale, self.kv_lora_rank
        out, _ = dsa.sparse_mla_attention(*arguments, self.sinks)
        return self._values(out)

    def _train(
        self, x: torch.Tensor, qr: torch.Tensor, rope: Angles, q: torch.Tensor, kv: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        """Compute attention in a pass that trains the indexer, and add the indexer's loss to `indexer_stage`. The loss
        has no gradients for x and qr."""
        if self.indexer_stage.name == "warmup":
            attention = WarmupAttention(q, *self._keys_and_values(kv), self.softmax_scale, batch)
        else:
            sizes = self.softmax_scale, self.kv_lora_rank, self.indexer.top_k
            attention = SparseAttention(self._absorb(q), kv, *sizes, batch)
        loss = self.indexer.loss(x.detach(), qr.detach(), rope, attention)
        self.indexer_stage.add(loss, batch)
        return attention.out if self.indexer_stage.name == "warmup" else self._values(attention.out)

    def _keys_and_values(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute k [T, heads, nope + rope] and v [T, heads, v_dim] of every head from kv [T, latent + rope]."""
        latent, k_pe = kv.split((self.kv_lora_rank, self.rope_dim), -1)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, -1)).split((self.nope_dim, self.v_dim), -1)
        return torch.cat((k_nope, k_pe[:, None].expand(-1, self.n_heads, -1)), -1), v

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Absorb W_UK into the queries: q [T, heads, nope + rope] -> [T, heads, latent + rope]."""
        q_nope, q_pe = q.split((self.nope_dim, self.rope_dim), -1)
        w_uk, _ = self._up_projections(q.dtype)
        return torch.cat((torch.einsum("thd,hdc->thc", q_nope, w_uk), q_pe), -1)

    def _values(self, latents: torch.Tensor) -> torch.Tensor:
        """Multiply the attention-weighted sums of latents [T, heads, latent] by W_UV. Return [T, heads, v_dim]."""
        return torch.einsum("thc,hvc->thv", latents, self._up_projections(latents.dtype)[1])

    def _up_projections(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (W_UK [heads, nope_dim, latent], W_UV [heads, v_dim, latent]) in `dtype`."""
        weight = weight_of(self.kv_b_proj, self.kv_lora_rank, dtype)
        weight = weight.unflatten(0, (self.n_heads, self.nope_dim + self.v_dim))
        return weight.split((self.nope_dim, self.v_dim), 1)


def _check_indexer(indexer: object, hidden: int, q_lora_rank: int, reader: nn.Module) -> None:
    """Raise TypeError unless `indexer` is a module with top_k and select. Raise TypeError or ValueError if the sizes or
    the dtype of a `LightningIndexer` do not fit the layer. reader: the layer's first query projection."""
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
