"""Pairs of tiny models (transformers' with eager attention, its copy on dsa's ops), adapters and padded batches."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsa_layers.hf import accelerate
from tests.layers.models import hf_models

# name -> (function of hf_models, changes of the model's config). Indexers select 8 tokens (V4: 4 compressed entries).
KINDS = {
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa, shared indexers": ("glm_moe_dsa", hf_models.SHARED),
    "deepseek_v4": ("deepseek_v4", {}),
}


@dataclass
class Pair:
    theirs: Any
    ours: Any
    directory: Path

    @torch.no_grad()
    def alone(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, vocabulary] of transformers' model for one sequence [S]."""
        return self.theirs(tokens[None]).logits[0]


def pair(kind: str, directory: Path, **changes: Any) -> Pair:
    build, own = KINDS[kind]
    theirs = getattr(hf_models, build)(directory, **(own | changes))
    return Pair(theirs, accelerate(copy.deepcopy(theirs)), directory)


def assert_close_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that each gradient agrees up to 1e-4 of its largest expected element: the order of fp32 sums may differ."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-9, name


class Adapter(nn.Module):
    """A low-rank adapter of `base`: y = base(x) + x A^T B^T. A and B are random with standard deviation `scale`."""

    def __init__(self, base: nn.Linear, scale: float = 0.05) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(scale * torch.randn(2, base.in_features))
        self.b = nn.Parameter(scale * torch.randn(base.out_features, 2))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def padded(tokens: torch.Tensor, lens: list[int], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, attention_mask) of the first lens[b] tokens of each tokens[b], padded with 255 on `side`."""
    ids, mask = torch.full((len(lens), max(lens)), 255), torch.zeros(len(lens), max(lens), dtype=torch.int64)
    for b, n in enumerate(lens):
        own = slice(max(lens) - n, None) if side == "left" else slice(n)
        ids[b, own], mask[b, own] = tokens[b, :n], 1
    return ids, mask
