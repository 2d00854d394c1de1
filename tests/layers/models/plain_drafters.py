"""Multi-token-prediction layers from their formulas, and small checkpoints that have one.

One sequence at a time, all keys of it in a row, every expert for every token: nothing is packed, paged, absorbed or
gathered. Of the library only the frequencies of rope are used. Weights go by the checkpoint's names.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import layer_norm, silu, softplus

from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.published import as_published, published_manifest, shape_of_values
from dsa_layers.models.config_file import read_config
from dsa_layers.models.registry import family
from dsa_layers.models.rotary import make_rotary
from dsa_layers.tiny import random_values

# Nothing is of a size that something else has; 32 index heads, so that no two keys have one score.
_MLA = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "q_lora_rank": 40, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "index_n_heads": 32, "index_head_dim": 36, "index_topk": 8, "rms_norm_eps": 1e-2,
    "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {
    "deepseek_v32": _MLA | {"rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    }},
    "glm_moe_dsa": _MLA | {"head_dim": 16, "qk_head_dim": 40},
    "deepseek_v4": {
        "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 48, "num_attention_heads": 4, "head_dim": 32,
        "qk_rope_head_dim": 8, "q_lora_rank": 40, "o_groups": 2, "o_lora_rank": 24, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "n_shared_experts": 2, "sliding_window": 8, "index_n_heads": 32,
        "index_head_dim": 16, "index_topk": 4, "swiglu_limit": 0.5, "rms_norm_eps": 1e-2, "hc_eps": 1e-3,
        "hc_mult": 3, "hc_sinkhorn_iters": 4, "max_position_embeddings": 4096,
        "compress_rates": {"heavily_compressed_attention": 16},
    },
}  # fmt: skip


def write_small(directory: Path, model: str, **changes) -> dict[str, torch.Tensor]:
    """Writes a checkpoint that is not quantised, with the layers of the family's tiny one; returns its tensors."""
    fields = family(model).tiny.fields(quantized=False) | SMALL[model] | changes
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    config = read_config(directory)
    manifest = published_manifest(config)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name in manifest:
        values = random_values(name, shape_of_values(name, manifest), generator, config.n_routed_experts)
        tensors |= as_published(name, values, manifest, {}, use_ue8m0=False)
    save_file(tensors, directory / SINGLE_NAME)
    return tensors


class _Layer:
    """The weights of a layer, by the names below its prefix, in fp32."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.config = read_config(directory)
        self.all = {name: tensor.float() for name, tensor in load_file(directory / SINGLE_NAME).items()}
        self.prefix = prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self.all[self.prefix + name]

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        return _unit(x, self.config.rms_norm_eps if eps is None else eps) * self(f"{name}.weight")

    def mlp(self, x: torch.Tensor, name: str, names: tuple[str, str, str], limit: float = math.inf) -> torch.Tensor:
        gate, up, down = (self(f"{name}.{part}.weight") for part in names)
        return (silu((x @ gate.T).clamp(max=limit)) * (x @ up.T).clamp(-limit, limit)) @ down.T

    def experts(self, x: torch.Tensor, mlp: str, weights: torch.Tensor, names: tuple[str, str, str], limit=math.inf):
        """Of every token and every expert; weights [T, experts] are 0 for those that are not chosen."""
        outs = [self.mlp(x, f"{mlp}.experts.{e}", names, limit) for e in range(weights.shape[1])]
        routed = sum(weight[:, None] * out for weight, out in zip(weights.T, outs))
        return routed + self.mlp(x, f"{mlp}.shared_experts", names, limit)


class PlainMLADrafter:
    """DeepSeek-V3.2's and GLM-5's. top_k: other than the configuration's, to see what the selection does."""

    def __init__(self, directory: Path, top_k: int | None = None) -> None:
        config = read_config(directory)
        self.w = _Layer(directory, f"model.layers.{config.num_hidden_layers}.")
        self.config, self.top_k = config, top_k or config.index_topk

    def join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What goes into the block at each position: of the next token and the states."""
        w = self.w
        e = w.all["model.embed_tokens.weight"][tokens]
        return torch.cat((w.norm(e, "enorm"), w.norm(states, "hnorm")), -1) @ w("eh_proj.weight").T

    def states(self, joined: torch.Tensor) -> torch.Tensor:
        """Of one sequence from its first position on."""
        x = self.w.norm(joined, "input_layernorm")
        angles = self._angles(len(x))
        return self._block(joined, x, angles, x, self._selected(x, angles))

    def further(self, joined: torch.Tensor, row: torch.Tensor, position: int) -> torch.Tensor:
        """Of a further step with the input `row` [1, hidden], at a position behind the first step's `joined`: it
        attends to what the first step's last position does."""
        x = self.w.norm(joined, "input_layernorm")
        angles = self._angles(position + 1)
        seen = self._selected(x, angles[: len(x)])[-1:]
        return self._block(row, self.w.norm(row, "input_layernorm"), angles[-1:], x, seen)

    def _block(self, joined, queries, angles, keys, seen) -> torch.Tensor:
        w = self.w
        x = joined + self._attention(queries, angles, keys, seen)
        x = x + self._moe(w.norm(x, "post_attention_layernorm"))
        return w.norm(x, "shared_head.norm")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.w.all["lm_head.weight"].T

    def _angles(self, count: int) -> torch.Tensor:
        return _angles(count, self.config.qk_rope_head_dim, self.config.rope)

    def _query_latents(self, x: torch.Tensor) -> torch.Tensor:
        return self.w.norm(x @ self.w("self_attn.q_a_proj.weight").T, "self_attn.q_a_layernorm", 1e-6)

    def _attention(self, x: torch.Tensor, angles: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Of the queries of x, at these angles, over the keys from the first position on. seen: bool [T, S]."""
        w, c = self.w, self.config
        heads, nope, rope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        q = (self._query_latents(x) @ w("self_attn.q_b_proj.weight").T).unflatten(-1, (heads, nope + rope))
        kv = keys @ w("self_attn.kv_a_proj_with_mqa.weight").T
        latent = w.norm(kv[:, :rank], "self_attn.kv_a_layernorm", 1e-6)
        expanded = (latent @ w("self_attn.kv_b_proj.weight").T).unflatten(-1, (heads, nope + c.v_head_dim))
        q_pe, k_pe = _pairs(q[..., nope:], angles[:, None]), _pairs(kv[:, rank:], self._angles(len(keys)))
        scores = torch.einsum("thd,shd->hts", q[..., :nope], expanded[..., :nope])
        scores = scores + torch.einsum("thd,sd->hts", q_pe, k_pe)
        scale = (nope + rope) ** -0.5
        if c.rope.yarn is not None:
            scale *= (0.1 * math.log(c.rope.yarn.factor) + 1) ** 2
        p = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
        out = torch.einsum("hts,shd->thd", p, expanded[..., nope:])
        return out.flatten(1) @ w("self_attn.o_proj.weight").T

    def _selected(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """bool [T, T]"""
        w, c = self.w, self.config
        heads, dim, rope = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        turned = _pairs if c.indexer_rope_interleave else _halves
        q = (self._query_latents(x) @ w("self_attn.indexer.wq_b.weight").T).unflatten(-1, (heads, dim))
        affine = w("self_attn.indexer.k_norm.weight"), w("self_attn.indexer.k_norm.bias")
        k = layer_norm(x @ w("self_attn.indexer.wk.weight").T, (dim,), *affine, 1e-6)
        q = torch.cat((turned(q[..., :rope], angles[:, None]), q[..., rope:]), -1)
        k = torch.cat((turned(k[:, :rope], angles), k[:, rope:]), -1)
        of_heads = x @ w("self_attn.indexer.weights_proj.weight").T * (heads * dim) ** -0.5
        scores = torch.einsum("th,ths->ts", of_heads, torch.einsum("thd,sd->ths", q, k).relu())
        seen = torch.zeros(len(x), len(x), dtype=torch.bool)
        for t, row in enumerate(scores):
            seen[t, row[: t + 1].topk(min(self.top_k, t + 1)).indices] = True
        return seen

    def _moe(self, x: torch.Tensor) -> torch.Tensor:
        w, c = self.w, self.config
        s = (x @ w("mlp.gate.weight").T).sigmoid()
        weights = torch.zeros_like(s)
        biased = (s + w("mlp.gate.e_score_correction_bias")).unflatten(-1, (c.n_group, -1))
        for t, groups in enumerate(biased):
            best = groups.topk(2).values.sum(-1).topk(c.topk_group).indices
            kept = torch.full_like(groups, -math.inf)
            kept[best] = groups[best]
            chosen = kept.flatten().topk(c.num_experts_per_tok).indices
            weights[t, chosen] = s[t, chosen] / s[t, chosen].sum() * c.routed_scaling_factor
        return w.experts(x, "mlp", weights, ("gate_proj", "up_proj", "down_proj"))


class PlainV4Drafter:
    """DeepSeek-V4's. window: other than the configuration's, to see what it does."""

    def __init__(self, directory: Path, window: int | None = None) -> None:
        self.config = read_config(directory)
        self.w = _Layer(directory, "mtp.0.")
        self.window = window or self.config.sliding_window

    def join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        w = self.w
        e = w.norm(w.all["embed.weight"][tokens], "enorm") @ w("e_proj.weight").T
        return torch.stack([e + w.norm(x, "hnorm") @ w("h_proj.weight").T for x in states.unbind(1)], 1)

    def states(self, joined: torch.Tensor) -> torch.Tensor:
        streams = self._sublayer(joined, "attn", self._attention)
        return self._sublayer(streams, "ffn", self._moe)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        w = self.w
        mix = self._mix(states, "hc_head") * w("hc_head_scale") + w("hc_head_base")
        x = ((mix.sigmoid() + self.config.hc_eps)[..., None] * states).sum(1)
        return w.norm(x, "norm") @ w.all["head.weight"].T

    def _mix(self, streams: torch.Tensor, name: str) -> torch.Tensor:
        flat = streams.flatten(1)
        return flat @ self.w(f"{name}_fn").T * (flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()

    def _sublayer(self, streams: torch.Tensor, name: str, sublayer) -> torch.Tensor:
        w, n, eps = self.w, self.config.hc_mult, self.config.hc_eps
        mix, scale, base = self._mix(streams, f"hc_{name}"), w(f"hc_{name}_scale"), w(f"hc_{name}_base")
        pre = (mix[:, :n] * scale[0] + base[:n]).sigmoid() + eps
        post = 2 * (mix[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
        comb = (mix[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        y = sublayer(w.norm((pre[..., None] * streams).sum(1), f"{name}_norm"))
        return post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", comb, streams)

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        w, c = self.w, self.config
        heads, rope, groups = c.num_attention_heads, c.qk_rope_head_dim, c.o_groups
        qr = w.norm(x @ w("attn.wq_a.weight").T, "attn.q_norm")
        q = _unit((qr @ w("attn.wq_b.weight").T).unflatten(-1, (heads, c.head_dim)), c.rms_norm_eps)
        k = w.norm(x @ w("attn.wkv.weight").T, "attn.kv_norm")
        angles = _angles(len(x), rope, c.rope)
        q = torch.cat((q[..., :-rope], _pairs(q[..., -rope:], angles[:, None])), -1)
        k = torch.cat((k[:, :-rope], _pairs(k[:, -rope:], angles)), -1)
        scores = torch.einsum("thd,sd->hts", q, k) * c.head_dim**-0.5
        t, s = torch.arange(len(x))[:, None], torch.arange(len(x))
        scores = scores.masked_fill((s > t) | (s <= t - self.window), -math.inf)
        sink = w("attn.attn_sink")[:, None, None].expand(-1, len(x), 1)
        p = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        out = torch.einsum("hts,sd->thd", p, k)
        out = torch.cat((out[..., :-rope], _pairs(out[..., -rope:], -angles[:, None])), -1)
        parts = out.flatten(1).chunk(groups, 1)
        matrices = w("attn.wo_a.weight").chunk(groups)
        return torch.cat([part @ a.T for part, a in zip(parts, matrices)], 1) @ w("attn.wo_b.weight").T

    def _moe(self, x: torch.Tensor) -> torch.Tensor:
        w, c = self.w, self.config
        s = softplus(x @ w("ffn.gate.weight").T).sqrt()
        weights = torch.zeros_like(s)
        for t, row in enumerate(s + w("ffn.gate.bias")):
            chosen = row.topk(c.num_experts_per_tok).indices
            weights[t, chosen] = s[t, chosen] / s[t, chosen].sum() * c.routed_scaling_factor
        return w.experts(x, "ffn", weights, ("w1", "w3", "w2"), c.swiglu_limit)


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _angles(count: int, dim: int, rope) -> torch.Tensor:
    """[T, dim / 2]"""
    return torch.arange(count)[:, None] * make_rotary(dim, rope).frequencies


def _pairs(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns channels (2i, 2i + 1)."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones(()), angles)
    return torch.view_as_real(turned).flatten(-2)


def _halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns channels (i, i + dim / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
