"""Which kernels a model's passes ask for, against passes of other sizes and against a generator's."""

import functools
import importlib
import random

import pytest
import torch
from torch.overrides import TorchFunctionMode

import dsa
from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as casts
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.op import OPS
from dsa.runtime.variants import Variant
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.compilation.passes import (
    META,
    TILES,
    decode,
    model_variants,
    prefill,
    with_all_tiles,
    without_memory,
)
from dsa_layers.engine.batch_invariance import batch_invariant
from dsa_layers.io.loading import precision_of
from tests.kernels.variants import all_compile_functions
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


def test_all_tiles_of_a_kernel():
    """With the arguments that the bridge gives: what has a default may be missing."""
    name, given = "compile_per_token_cast_to_fp8", ("bfloat16", True, False)
    tiles = {a[3] for f, a in casts.shipped_variants() if f.__name__ == name and a[:3] == given}
    of_tiles = {Variant(casts.__name__, name, (*given, tile)) for tile in tiles}
    assert with_all_tiles([min(of_tiles, key=repr)]) == of_tiles and len(tiles) > 1
    other = Variant("dsa.kernels.moe.sort_by_expert_sm90", "compile_sort_by_expert", ("int64",))
    assert with_all_tiles([other]) == {other}


def test_tiles_are_of_kernels_that_there_are():
    functions = {function.__name__: function for function in all_compile_functions()}
    for name, place in TILES.items():
        module = importlib.import_module(functions[name].__module__)
        assert len({a[place] for f, a in module.shipped_variants() if f.__name__ == name}) > 1, name


def test_nothing_is_kept_of_the_search():
    """Ops run their references again, and no kernel that does nothing is found later."""
    x, weight = torch.zeros(4, 512, dtype=torch.bfloat16, device=META), torch.ones(512, device=META)
    for _ in range(2):
        with asked_variants("sm_90") as asked:
            dsa.rms_norm(x, weight, 1e-6)
        assert [v.function for v in asked] == ["compile_rms_norm"]
    normed = dsa.rms_norm(torch.randn(4, 512), None, 0.0)
    assert torch.allclose(normed.square().mean(-1), torch.ones(4))
    assert not any(op.known.steps or op.known._times for op in OPS.values())
    assert not x.is_cuda
