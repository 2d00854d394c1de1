"""`WindowAttention` for inference, with a ring of keys per sequence, on one or several ranks."""

import torch

import dsa
from dsa_layers.batch.token_batch import TokenBatch, check_tokens
from dsa_layers.batch.views import WindowView
from dsa_layers.cache.windowed_kv_cache import RingCache
from dsa_layers.engine.joint_linear import Cast
from dsa_layers.engine.layer_pass import check_inference
from dsa_layers.engine.paged_attention import AttentionPass, PagedAttention, by_head
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.parallel.placement import placement_of


class PagedWindowAttention(PagedAttention, WindowAttention):
    """`WindowAttention` for inference.

    A prefill uses the multi-head form (attention_form.py), block by block (`WindowBlocks`); decoding uses the absorbed
    form, in PyTorch.

    forward(x, cos, sin, batch, cache=None, selected=None, cast=None) -> ([T, hidden], selected), without gradients.
    See `PagedAttention`; `selected` is passed on unchanged.
    """

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: RingCache | None = None,
        selected: object = None,
        *,
        cast: Cast | None = None,
    ) -> tuple[torch.Tensor, object]:
        self.check_pass(x, batch)
        check_inference(x, batch, cache, RingCache)
        with torch.no_grad():
            step = AttentionPass(batch, (cos, sin), cache, placement_of(batch, self.ranks))
            check_tokens(x, step.placement.local_cached(batch.positions))
            y = (self.part or self)._in_windows(x, cast, step)
            return step.placement.reduce(y), selected

    def _in_windows(self, x: torch.Tensor, cast: Cast | None, step: AttentionPass) -> torch.Tensor:
        latents = self._latents(x, cast, step)
        kv = self._norm_and_rotate(latents.keys, step.angles)
        q, gate = self._project_queries(x, latents, step)
        ring = None if step.cache is None else step.cache.ring
        windows = step.batch.windows(self.window, self.window if ring is None else ring.shape[1])
        if step.decode:
            dsa.write_kv_cache(kv, ring, windows.slots)
            return self._output(self._absorbed(q, ring, windows, step), gate)
        keys = kv
        if ring is not None:
            if any(windows.earlier_lens):
                keys = torch.cat((dsa.read_kv_cache(ring, windows.earlier_slots, dtype=kv.dtype), kv))
                keys = keys if windows.in_order else keys[windows.order]
            dsa.write_kv_cache(kv, ring, windows.slots)
        return self._output(self._in_blocks(q, keys, windows, step), gate)

    def _absorbed(self, q: torch.Tensor, ring: torch.Tensor, windows: WindowView, step: AttentionPass) -> torch.Tensor:
        """Return attention of a decoding pass in the absorbed form, [T, heads, v_dim]. q: before rope."""
        w_uk, w_uv = self._up_projections(q.dtype)
        q = self._absorbed_queries(*q.split((self.nope_dim, self.rope_dim), -1), w_uk, step)
        slots = windows.decode_slots.flatten(0, 1)
        keys = dsa.read_kv_cache(ring, slots, dtype=q.dtype)  # zeros for slot -1
        logits = torch.bmm(q, keys.mT).float() * self.softmax_scale
        weights = logits.masked_fill_((slots < 0)[:, None], -torch.inf).softmax(-1).to(q.dtype)
        return by_head(torch.bmm(weights, keys[..., : self.kv_lora_rank]), w_uv.mT)

    def _in_blocks(self, q: torch.Tensor, keys: torch.Tensor, windows: WindowView, step: AttentionPass) -> torch.Tensor:
        """Return attention of a prefill in the multi-head form, [T, heads, v_dim].

        q: before rope; this method may overwrite it. keys: sorted by `WindowView.order`, [N, latent + rope]
        """
        blocks = windows.blocks
        q_pe = q[..., self.nope_dim :]
        dsa.apply_rotary(q_pe, *step.angles, interleaved=True, out=q_pe)
        latent, k_pe = keys[blocks.rows].split((self.kv_lora_rank, self.rope_dim), -1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.n_heads, self.nope_dim + self.v_dim))
        k_nope, v = expanded.split((self.nope_dim, self.v_dim), -1)
        out, _ = dsa.mha_varlen_fwd(
            *(q, k_nope, v, blocks.cu_tokens, blocks.cu_keys, blocks.most, self.softmax_scale),
            k_rope=k_pe,
            selected=blocks.bits,
            dense_keys=self.window,
        )
        return out
