"""Which kernels a model's passes ask for, against passes of other sizes and against a generator's."""

import functools
import random

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dsa.runtime.asked_variants import asked_variants
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.compilation import (
    decode,
    model_variants,
    prefill,
    without_memory,
)
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.io.loading import precision_of
from tests.layers.compilation.configs import published, tiny


@functools.cache
def variants_of(model_type, *, drafts=0, gpus=1, **options):
    """Of the tiny model; listed once a process, which takes seconds."""
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
    """The list is of some sizes; passes of random ones ask for nothing that it lacks."""
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
    assert len(listed) < 130


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v4_flash", "glm_5_2"])
def test_a_chunk_at_the_end_of_a_million_tokens_asks_for_no_other_kernels(name):
    """It has so many keys that they are selected as their scores are computed."""
    config = published(name)
    precision = precision_of(config)
    model, cache = without_memory(config, precision)
    with asked_variants("sm_90") as asked:
        prefill(model, cache, [(4096, config.max_position_embeddings - 4096)])
    assert "compile_candidate_scores" in {variant.function for variant in asked}
    assert asked.keys() <= {*model_variants(config, precision)}


ZEROS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class Zeroed(TorchFunctionMode):
    """Memory that nobody has written to holds zeros: indices that kernels would write are in bounds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return ZEROS.get(function, function)(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "drafts"),
    [
        ("glm_moe_dsa", 2),
        ("deepseek_v4", 0),
        ("deepseek_v4", 2),
        ("deepseek_v32", 2),
    ],
)
def test_a_generator_asks_for_no_other_kernels(model_type, drafts, tiny_checkpoint):
    """With weights, on the CPU, and kernels that do nothing: prefill in chunks, of one prompt and of several, and
    decoding while sequences end one by one."""
    model = load_model(tiny_checkpoint(model_type), drafter=drafts > 0, progress=False)
    generator = Generator(model, cache_tokens=16384, prefill_chunk=1500, draft_tokens=drafts)
    draw = random.Random(1)
    with asked_variants("sm_90") as asked, Zeroed():
        for lens in ([1], [5], [2200], [3, 700, 40], [1] * 9, [2500, 2300]):
            prompts = [[draw.randrange(3, 100) for _ in range(n)] for n in lens]
            generator.generate(prompts, [SamplingParams(max_tokens=2 + i) for i in range(len(prompts))])
    assert len(asked) > 20 and asked.keys() <= variants_of(model_type, drafts=drafts)
