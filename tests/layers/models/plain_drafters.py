"""Reference implementations of multi-token-prediction layers. The decoder block, without fused layers, and its rope
angles are the model's. Everything around the block is written from the formulas, with the checkpoint's weights."""

import copy
from pathlib import Path

import torch

from dsa_layers import SequenceBatch, load_model, read_config
from dsa_layers.models.glm_moe_dsa import DraftedStates
from tests.layers.io.stand_ins import read_tensors


def drafter_prefix(directory: Path) -> str:
    """Return the beginning of the stored names of the drafter's tensors."""
    config = read_config(directory)
    own = {"deepseek_v4": "mtp.0.", "hy_v4": "model.mtp_layers.0.", "hy_v4_vl": "model.mtp_layers.0."}
    return own.get(config.model_type, f"model.layers.{config.num_hidden_layers}.")


class _Drafter:
    """Common parts of all drafters."""

    def __init__(self, directory: Path) -> None:
        # Layers of trainable models are not fused.
        self.model = load_model(directory, dtype=torch.float32, trainable=True, drafter=True, progress=False)
        self.config, self.block = self.model.config, self.model.drafter.block
        self.prefix = drafter_prefix(directory)
        self.tensors = {name: tensor.float() for name, tensor in read_tensors(directory).items()}

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        unit = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return unit * self.weight(f"{name}.weight")


class PlainMLADrafter(_Drafter):
    final_norm, embedding = "shared_head.norm", "model.embed_tokens.weight"

    def join(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the block's inputs. For each row of `states`, `tokens` has the token at the next position."""
        e = self.tensors[self.embedding][tokens]
        return torch.cat((self.norm(e, "enorm"), self.norm(states, "hnorm")), -1) @ self.weight("eh_proj.weight").T

    def states(self, joined: torch.Tensor) -> torch.Tensor:
        return self.norm(self._run(self.block, joined)[0], self.final_norm)

    def further(self, joined: torch.Tensor, row: torch.Tensor, position: int) -> torch.Tensor:
        """Return the state at `position` of a later step with the block's input `row` [1, hidden]. The step attends to
        the keys that the last row of `joined`, the first step's inputs, attends to."""
        _, selected = self._run(self.block, joined)
        keys = torch.arange(len(joined), dtype=torch.int32) if selected is None else selected[-1]
        block = copy.copy(self.block)
        block._modules = self.block._modules | {"self_attn": copy.copy(self.block.self_attn)}
        block.self_attn._modules = self.block.self_attn._modules | {"indexer": None}
        between = torch.zeros(position - len(joined), joined.shape[1])
        y, _ = self._run(block, torch.cat((joined, between, row)), keys.expand(position + 1, -1))
        return self.norm(y[-1:], self.final_norm)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.tensors["lm_head.weight"].T

    def rotary(self, positions):
        return self.model.model.rotary(positions)

    def _run(self, block, x, selected=None):
        batch = SequenceBatch.without_cache([len(x)])
        return block(x, *self.rotary(batch.positions), batch, None, selected)


class PlainHYV4Drafter(PlainMLADrafter):
    final_norm = "final_layernorm"


class PlainDots3NoteDrafter(PlainMLADrafter):
    embedding = "model.mtp.embed_tokens.weight"

    def rotary(self, positions):
        return self.model.model.window_rotary(positions)


class PlainV4Drafter(_Drafter):
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


PLAIN = {
    "deepseek_v4": PlainV4Drafter,
    "dots3_note": PlainDots3NoteDrafter,
    "hy_v4": PlainHYV4Drafter,
    "hy_v4_vl": PlainHYV4Drafter,
}


def values(states: torch.Tensor | DraftedStates) -> torch.Tensor:
    """Return the tensor of a drafter's states."""
    return states.values if isinstance(states, DraftedStates) else states
