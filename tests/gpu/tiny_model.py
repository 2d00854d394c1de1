"""The tiny checkpoint's model on the GPU in bf16: compare generation with kernels and generation with references.

Two runs that differ by rounding diverge, because rounding decides near-ties between keys, experts and tokens. So the
references run first, and the kernels' run uses their choices (selected keys, experts, tokens). The comparisons are:
- every call of the attention op with the reference on the same arguments,
- the logits with those of the references' run,
- the choices that the kernels' run would have made itself, with the choices of the references' run.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import pytest
import torch

import dsa
from dsa import reference
from dsa.cases.attention import PREFILL_TOLERANCES, SPARSE_TOLERANCES
from dsa.testing import assert_close, calc_diff
from dsa_layers.engine import fused_moe, paged_attention
from dsa_layers.engine.fuse import fuse
from dsa_layers.generation import steps
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.tensors import split_experts
from dsa_layers.io.weights import load_weights
from dsa_layers.layers.experts import ByExpert
from dsa_layers.models.deepseek_v32 import DeepseekV32ForCausalLM
from dsa_layers.models.family import read_config
from dsa_layers.models.precision import Precision
from dsa_layers.tiny import write_tiny_checkpoint
from tests.gpu.launched_ops import launched_ops

# Two sequences longer than the 128 keys that a token selects, and a shorter one.
PROMPTS = [list(range(100, 430)), list(range(900, 1050)), [7, 8, 9]]
LAYERS = 4
PREFILL_OPS = {
    *("quantize_indexer_queries", "write_indexer_keys", "read_indexer_cache", "fp8_mqa_logits", "topk_indices"),
    *("write_mla_cache", "flash_mla_sparse_fwd"),
}
DECODE_OPS = {"get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits", "flash_mla_with_kvcache"}
# Limit of calc_diff of the logits. With the same choices, the references in bf16 have a calc_diff of 1e-4 from the
# references in fp32. If their pages are FP8, it is 6e-4. This is the effect of rounding between the layers.
LOGITS_TOLERANCE = 1e-3
# Tokens whose logits differ by less than this can change their order. The standard deviation of the logits is 2.
NEAR_TIE = 0.25
# {attention op: (tolerance of calc_diff of out, relative tolerance of lse)}
ATTENTION = {
    name: (out["cos_tol"], lse["rel_tol"])
    for name, (out, lse) in {
        "flash_mla_sparse_fwd": PREFILL_TOLERANCES,
        "flash_mla_with_kvcache": SPARSE_TOLERANCES,
    }.items()
}
# A logit of attention is an fp32 sum of 576 products of order 1, so even an LSE near 0 has this error.
LSE_ABS_TOLERANCE = 1e-5


@dataclass
class Run:
    """The choices and results of a run, in the order of the calls.

    topk_indices  the results of every call of topk_indices with the run's own scores
    routes        the results of every call of `fused_moe.route` with the run's own activations
    logits        the logits [vocabulary] of every new token
    tokens        the new tokens of every pass, by the run's own logits
    launched      the ops that ran their kernels
    """

    topk_indices: list[torch.Tensor] = field(default_factory=list)
    routes: list[tuple[torch.Tensor, torch.Tensor, ByExpert]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)


@functools.cache
def load(kv_cache: Literal["fp8", "model"]) -> DeepseekV32ForCausalLM:
    """Return the model with bf16 weights and FP8 index keys. The cached latents are FP8 or, with "model", bf16.

    FP8 linear layers would round activations to e4m3. This would magnify a difference in the last bit of bf16 several
    times.
    """
    precision = Precision(torch.bfloat16, fp8_linear=False, fp8_indexer=True, kv_cache=kv_cache)
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(directory)
        config = read_config(directory)
        with torch.device("meta"):
            model = fuse(DeepseekV32ForCausalLM(config, precision))
        parts_of = functools.partial(split_experts, experts=config.n_routed_experts)
        names = {"skip": model.skips, "name_of": model.name_of, "parts_of": parts_of}
        load_weights(model, directory, device="cuda", progress=False, **names)
    model.init_buffers("cuda")
    return model.eval()


def generate(model: DeepseekV32ForCausalLM, chunk: int, new_tokens: int, given: Run | None = None) -> Run:
    """Generate greedy tokens for all PROMPTS together. A pass has at most `chunk` prompt tokens. At the beginning all
    pages contain NaN.

    With `given`, the run uses the choices of `given`, but records its own.
    """
    run = Run()
    followed = given or run
    sample = steps.sample

    def sample_and_note(logits: torch.Tensor, *arguments: Any) -> list[list[int | None]]:
        run.logits.extend(logits[:, 0])
        return sample(logits, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        run.launched = launched_ops(patch)
        # The references' run uses the absorbed form of attention. The kernels' run uses its selections call by call.
        patch.setattr(paged_attention, "multi_head_is_faster", lambda *_: False)
        patch.setattr(dsa, "topk_indices", _following(dsa.topk_indices, run.topk_indices, followed.topk_indices))
        patch.setattr(fused_moe, "route", _following(fused_moe.route, run.routes, followed.routes))
        patch.setattr(steps, "sample", _following(sample_and_note, run.tokens, followed.tokens))
        # Choices inside a graph cannot be replaced.
        generator = Generator(model, cache_tokens=1024, prefill_chunk=chunk, cuda_graphs=False)
        for layer in range(LAYERS):
            pages = generator.cache.layer(layer)
            pages.latent.view(torch.uint8).fill_(0xFF)
            pages.index.view(torch.uint8).fill_(0xFF)
        generator.generate(PROMPTS, SamplingParams(new_tokens))
    return run


def _following(choose: Callable[..., Any], chosen: list, followed: list) -> Callable[..., Any]:
    """Return a function that appends the result of `choose` to `chosen`, and returns the result in `followed` of the
    same call."""

    def answer(*arguments: Any, **options: Any) -> Any:
        chosen.append(choose(*arguments, **options))
        return followed[len(chosen) - 1]

    return answer


def run_beside_references(
    kv_cache: Literal["fp8", "model"],
    chunk: int,
    new_tokens: int,
    attention: str,
    report: Callable[[str, Any], None],
) -> tuple[Run, list[int]]:
    """Return (the kernels' run, the number of queries in each call of the op `attention` by this run). report: called
    with (name, figure) for each comparison"""
    model, op, exact, queries = load(kv_cache), getattr(dsa, attention), getattr(reference, attention), []
    most, lse_rel_tol = ATTENTION[attention]
    with dsa.use_backend("reference"):
        expected = generate(model, chunk, new_tokens)
    assert not expected.launched

    def checked(q: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        out, *rest = op(q, *arguments, **options)
        expected_out, *expected_rest = exact(q.float(), *arguments, **options)
        # The op's bounds on single numbers of out assume values of about 0.1. Here values are of order 1.
        assert calc_diff(out, expected_out) < most
        for x, y in zip(rest, expected_rest, strict=True):
            assert_close("lse or max_logits", x, y, abs_tol=LSE_ABS_TOLERANCE, rel_tol=lse_rel_tol)
        queries.append(len(q))
        return out, *rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa, attention, checked)
        run = generate(model, chunk, new_tokens, expected)
    _compare(run, expected, report)
    return run, queries


def _compare(run: Run, expected: Run, report: Callable[[str, Any], None]) -> None:
    logits, expected_logits = torch.stack(run.logits), torch.stack(expected.logits)
    diff = calc_diff(logits, expected_logits)
    first = _overlaps(run.topk_indices[::LAYERS], expected.topk_indices[::LAYERS])
    overlaps = _overlaps(run.topk_indices, expected.topk_indices)
    pairs = list(zip(chain(*chain(*run.tokens)), chain(*chain(*expected.tokens)), strict=True))
    margins = torch.stack([expected_logits[i, token] - expected_logits[i, own] for i, (own, token) in enumerate(pairs)])
    different = sum(own != token for own, token in pairs)
    report("calc_diff of the logits", diff)
    report("overlap of the selections: mean, least", (overlaps.mean().item(), overlaps.min().item()))
    report("overlap in the first layer: mean, least", (first.mean().item(), first.min().item()))
    report("tokens that differ, of", (different, len(margins)))
    assert diff < LOGITS_TOLERANCE
    # The first layer's indexer has the same input in both runs. The inputs of other layers differ by rounding.
    assert first.mean() > 0.999 and first.min() > 0.95
    assert overlaps.mean() > 0.98 and overlaps.min() > 0.85
    assert margins.max() < NEAR_TIE and different <= 1 + len(margins) // 8


def _overlaps(topk_indices: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """Return fp32 [rows of all calls]: the fraction of a row's expected keys that the row has selected."""
    shares = []
    for own, other in zip(topk_indices, expected, strict=True):
        valid = other >= 0
        found = ((own[:, :, None] == other[:, None]).any(1) & valid).sum(1)
        shares.append(found / valid.sum(1))
    return torch.cat(shares)
