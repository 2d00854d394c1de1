"""Multi-token-prediction layers as their formulas say, around a plain block, and small checkpoints that have one.

The plain block is of the class that the parity tests hold against transformers'. Here one sequence at a time runs
through it, without a cache. Weights around the block go by the checkpoint's names.
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io.directory import SINGLE_NAME
from dsa_layers.io.loading import load_model
from dsa_layers.io.published import published_manifest
from dsa_layers.io.tensors import TORCH_DTYPES
from dsa_layers.models.family import family, read_config
from dsa_layers.tiny import random_values

# All sizes differ. There are 32 index heads, so that no two keys have the same score.
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
    for name, info in manifest.items():
        values = random_values(name, info.shape, generator, config.n_routed_experts)
        tensors[name] = values.to(TORCH_DTYPES[info.dtype])
    save_file(tensors, directory / SINGLE_NAME)
    return tensors


class _Drafter:
    """The parts that both kinds of drafters have. prefix: of the layer's tensors in the checkpoint."""

    def __init__(self, directory: Path, prefix: str) -> None:
        # Trainable models are plain.
        self.model = load_model(directory, dtype=torch.float32, trainable=True, drafter=True, progress=False)
        self.config, self.block, self.prefix = self.model.config, self.model.drafter.block, prefix
        self.tensors = {name: tensor.float() for name, tensor in load_file(directory / SINGLE_NAME).items()}

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        unit = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return unit * self.weight(f"{name}.weight")


class PlainMLADrafter(_Drafter):
    """The drafter of DeepSeek-V3.2 and GLM-5."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, f"model.layers.{read_config(directory).num_hidden_layers}.")

    def join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The block's inputs, from the next tokens and the states."""
        e = self.tensors["model.embed_tokens.weight"][tokens]
        return torch.cat((self.norm(e, "enorm"), self.norm(states, "hnorm")), -1) @ self.weight("eh_proj.weight").T

    def states(self, joined: torch.Tensor) -> torch.Tensor:
        """The states of one sequence from its first position on."""
        return self.norm(self._run(self.block, joined)[0], "shared_head.norm")

    def further(self, joined: torch.Tensor, row: torch.Tensor, position: int) -> torch.Tensor:
        """The state of a further step with the input `row` [1, hidden] at a position after the first step's `joined`.
        It attends to the keys that the last position of `joined` attends to."""
        _, selected = self._run(self.block, joined)
        keys = torch.arange(len(joined), dtype=torch.int32) if selected is None else selected[-1]
        block = copy.copy(self.block)
        block._modules = self.block._modules | {"self_attn": copy.copy(self.block.self_attn)}
        block.self_attn._modules = self.block.self_attn._modules | {"indexer": None}
        between = torch.zeros(position - len(joined), joined.shape[1])
        y, _ = self._run(block, torch.cat((joined, between, row)), keys.expand(position + 1, -1))
        return self.norm(y[-1:], "shared_head.norm")

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.tensors["lm_head.weight"].T

    def _run(self, block, x, selected=None):
        batch = SequenceBatch.without_cache([len(x)])
        return block(x, *self.model.model.rotary(batch.positions), batch, None, selected)


class PlainV4Drafter(_Drafter):
    """The drafter of DeepSeek-V4."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "mtp.0.")

    def join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        e = self.norm(self.tensors["embed.weight"][tokens], "enorm") @ self.weight("e_proj.weight").T
        return torch.stack([e + self.norm(x, "hnorm") @ self.weight("h_proj.weight").T for x in states.unbind(1)], 1)

    def states(self, joined: torch.Tensor) -> torch.Tensor:
        batch = SequenceBatch.without_cache([len(joined)])
        return self.block(joined, None, self.model.rotaries["main"](batch.positions), None, batch)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        flat = states.flatten(1)
        unit = (flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        mix = flat @ self.weight("hc_head_fn").T * unit * self.weight("hc_head_scale") + self.weight("hc_head_base")
        x = ((mix.sigmoid() + self.config.hc_eps)[..., None] * states).sum(1)
        return self.norm(x, "norm") @ self.tensors["head.weight"].T
