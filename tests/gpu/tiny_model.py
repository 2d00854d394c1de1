"""The tiny FP8 checkpoint's model on the GPU, in bf16: a run under the kernels beside one under the references.

Two runs that differ by rounding part ways: near-ties decide which keys and which experts a token gets, and which token
is next. So the references run first, and the kernels' run follows what they chose. What it would have chosen itself is
noted too.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

import dsa
from dsa import backends
from dsa_layers import generation
from dsa_layers.layers.moe import GroupedSigmoidRouter
from dsa_layers.models.deepseek_v32 import DeepseekV32ForCausalLM
from dsa_layers.models.loading import load_model
from dsa_layers.sampling import SamplingParams
from dsa_layers.tiny_checkpoint import write_tiny_checkpoint

# Two sequences beyond the indexer's 128 keys, the longest of them after some chunks only, and a short one beside them.
PROMPTS = [list(range(100, 430)), list(range(900, 1050)), [7, 8, 9]]


@dataclass
class Run:
    """In order: the indices of every top-k, (experts, weights) of every router, the logits behind every new token, and
    the tokens. launched: the ops that ran their kernels."""

    picks: list[torch.Tensor] = field(default_factory=list)
    routes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)


@functools.cache
def load(kv_cache: Literal["fp8", "model"]) -> DeepseekV32ForCausalLM:
    """"model": the latents are cached in bf16."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(directory)
        return load_model(directory, device="cuda", kv_cache=kv_cache, progress=False)


def generate(
    model: DeepseekV32ForCausalLM, prompts: Sequence[Sequence[int]], chunk: int, new_tokens: int, follow: Run | None = None
) -> Run:
    """Greedy tokens for all prompts together, `chunk` prompt tokens a pass, over pages that are NaN at first."""
    run = Run()
    given = follow or run
    runs_kernel, sample = backends.runs_kernel, generation.sample

    def spy(op: str, tensor: torch.Tensor) -> bool:
        if answer := runs_kernel(op, tensor):
            run.launched.add(op)
        return answer

    def noted_sample(logits: torch.Tensor, *arguments: Any) -> int:
        run.logits.append(logits)
        return sample(logits, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "runs_kernel", spy)
        patch.setattr(dsa, "topk_indices", _noted(dsa.topk_indices, run.picks, given.picks))
        patch.setattr(GroupedSigmoidRouter, "forward", _noted(GroupedSigmoidRouter.forward, run.routes, given.routes))
        patch.setattr(generation, "sample", _noted(noted_sample, run.tokens, given.tokens))
        generator = generation.Generator(model, cache_tokens=1024, prefill_chunk=chunk)
        for i in range(len(model.model.layers)):
            for pages in (generator.cache.layer(i).latent, generator.cache.layer(i).index):
                pages.view(torch.uint8).fill_(0xFF)
        generator.generate(prompts, SamplingParams(new_tokens))
    return run


def _noted(function: Callable[..., Any], results: list, given: list) -> Callable[..., Any]:
    """`function`, whose results are noted, and which returns `given`, one after the other."""

    def call(*arguments: Any, **options: Any) -> Any:
        results.append(function(*arguments, **options))
        return given[len(results) - 1]

    return call


def overlaps(run: Run, given: Run) -> torch.Tensor:
    """Of each row of each top-k, the share of the given picks that the run would have picked too."""
    shares = []
    for own, other in zip(run.picks, given.picks, strict=True):
        same = ((own[:, :, None] == other[:, None]) & (other[:, None] >= 0)).sum((1, 2))
        shares.append(same / (other >= 0).sum(1))
    return torch.cat(shares)
