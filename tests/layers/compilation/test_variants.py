"""`model_variants` lists the kernels that passes of any size, a generator, or the ranks of a split model request."""

import functools
import random

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dsa.kernels.parallel.limits import DTYPES
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.compilation import decode, model_variants, prefill, without_memory
from dsa_layers.engine.fp32_product import batch_invariant
from dsa_layers.io.loading import precision_of
from tests.layers.layers.calls import record
from tests.layers.models.configs import published, tiny
from tests.layers.parallel.processes import in_ranks


@functools.cache
def variants_of(model_type, *, drafts=0, gpus=1, **options):
    config = tiny(model_type)
    return set(model_variants(config, precision_of(config, **options), drafts=drafts, gpus=gpus))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("deepseek_v4", {}),
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {}),
        ("glm_moe_dsa", {"dequantize": True}),
        ("deepseek_v4", {"dequantize": True}),
    ],
    ids=str,
)
def test_passes_of_any_size_ask_for_no_other_kernels(model_type, options):
    config = tiny(model_type)
    listed = variants_of(model_type, **options)
    draw, context = random.Random(0), config.max_position_embeddings
    precision = precision_of(config, **options)
    model, cache = without_memory(config, precision)
    with asked_variants("sm_90") as asked:
        for _ in range(12):
            count = round(2 ** draw.uniform(0, 6))
            news = [min(round(2 ** draw.uniform(0, 12)), context // 2) for _ in range(draw.choice((1, 1, 2, 5)))]
            earlier = (draw.choice((0, round(2 ** draw.uniform(0, 14)))) for _ in news)
            prefill(model, cache, [(new, min(cached, context - new)) for new, cached in zip(news, earlier)])
            decode(model, cache, count, round(2 ** draw.uniform(0, 16)))
            with batch_invariant("decoding" if precision.fp8_linear else None):
                decode(model, cache, count, round(2 ** draw.uniform(0, 16)))
    assert asked and asked.keys() <= listed
    assert len(listed) < 130  # each kernel takes seconds to compile


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v4_flash", "glm_5_2"])
def test_a_chunk_at_the_end_of_a_million_tokens_asks_for_no_other_kernels(name):
    """With so many keys, the model calls `dsa.indexer_select`, which requests candidate_scores."""
    config = published(name)
    precision = precision_of(config)
    model, cache = without_memory(config, precision)
    with asked_variants("sm_90") as asked:
        prefill(model, cache, [(4096, config.max_position_embeddings - 4096)])
    assert "compile_candidate_scores" in {variant.function for variant in asked}
    assert asked.keys() <= {*model_variants(config, precision)}


ZEROS = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, torch.Tensor.new_empty: torch.Tensor.new_zeros}


class Zeroed(TorchFunctionMode):
    """Fills uninitialised memory with zeros. Kernels write nothing here, and 0 is valid where results are indices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return ZEROS.get(function, function)(*args, **(kwargs or {}))


def generated(ranks, directory, drafts, chunk, calls):
    """Return the kernels that a generator requests. ranks: None for one process. calls: lengths of prompts per call."""
    model = load_model(directory, mesh=ranks, drafter=drafts > 0, progress=False)
    generator = Generator(model, cache_tokens=16384, prefill_chunk=chunk, draft_tokens=drafts)
    draw = random.Random(1)  # the same prompts on all ranks
    with asked_variants("sm_90") as asked, Zeroed():
        for lens in calls:
            prompts = [[draw.randrange(3, 100) for _ in range(n)] for n in lens]
            generator.generate(prompts, [SamplingParams(max_tokens=2 + i) for i in range(len(prompts))])
    return set(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "drafts"), [("glm_moe_dsa", 2), ("deepseek_v4", 0), ("deepseek_v4", 2), ("deepseek_v32", 2)]
)
def test_a_generator_asks_for_no_other_kernels(model_type, drafts, tiny_checkpoint):
    calls = [1], [5], [2200], [3, 700, 40], [1] * 9, [2500, 2300]
    asked = generated(None, tiny_checkpoint(model_type), drafts, 1500, calls)
    assert len(asked) > 20 and asked <= variants_of(model_type, drafts=drafts)


def sums(variants):
    return {variant for variant in variants if variant.module.startswith("dsa.kernels.parallel.")}


SUMS = {
    *(Variant("dsa.kernels.parallel.one_shot_sum_sm90", "compile_one_shot_sum", (dtype, 2)) for dtype in DTYPES),
    *(
        Variant("dsa.kernels.parallel.experts_sum_sm90", "compile_experts_sum", (dtype, 2, shared))
        for dtype in DTYPES
        for shared in (False, True)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32", "deepseek_v4"])
def test_ranks_ask_for_no_other_kernels(model_type, tiny_checkpoint):
    """Chunks of at least 256 tokens are sharded. Sums over ranks request no kernels on a CPU, so SUMS lists them."""
    expected, alone = variants_of(model_type, drafts=2, gpus=2), variants_of(model_type, drafts=2)
    of_ranks = in_ranks(2, generated, tiny_checkpoint(model_type), 2, 400, [[500], [3, 300, 40]])
    assert all(len(asked) > 20 and asked <= expected for asked in of_ranks)
    assert not of_ranks[0] <= alone  # the kernels of one GPU do not suffice
    assert sums(expected) == SUMS and not sums(alone)


@pytest.mark.parametrize("gpus", [1, 2])
def test_products_of_split_experts_expect_their_share_of_the_rows(gpus, monkeypatch):
    """Ops choose kernels by `expected_rows`. A GPU that has all experts passes None."""
    products = "grouped_fp8_fp4_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"
    found = record(monkeypatch, *products, seen=lambda *_, expected_rows, **__: expected_rows)
    config = tiny("deepseek_v4")
    model, cache = without_memory(config, precision_of(config), gpus=gpus)
    for tokens in (1, 7):
        found.clear()
        with asked_variants("sm_90"):
            decode(model, cache, tokens, 64)
        assert {*found} == {None if gpus == 1 else -(-tokens * config.num_experts_per_tok // 2)}
