"""Which kernels each of several GPUs asks for that have a part of a model, against ranks that generate with theirs."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from dsa.kernels.parallel.limits import DTYPES, RANKS
from dsa.parallel.one_shot_sum import OneShotSum
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.compilation import META, decode, without_memory
from dsa_layers.io.loading import precision_of
from tests.layers.compilation.configs import tiny
from tests.layers.compilation.test_variants import Zeroed, variants_of
from tests.layers.layers.calls import record
from tests.layers.parallel.processes import in_ranks

SUMS, EXPERTS = "dsa.kernels.parallel.one_shot_sum_sm90", "dsa.kernels.parallel.experts_sum_sm90"


def sums(gpus):
    of_experts = {
        Variant(EXPERTS, "compile_experts_sum", (dtype, gpus, shared)) for dtype in DTYPES for shared in (False, True)
    }
    return of_experts | {Variant(SUMS, "compile_one_shot_sum", (dtype, gpus)) for dtype in DTYPES}


def generated(ranks, directory):
    """What a rank asks for: for prompts in chunks of which ranks share the rows, and in short passes."""
    model = load_model(directory, mesh=ranks, drafter=True, progress=False)
    generator = Generator(model, cache_tokens=16384, prefill_chunk=400, draft_tokens=2)
    draw = random.Random(1)  # the same prompts on all ranks
    with asked_variants("sm_90") as asked, Zeroed():
        for lens in ([500], [3, 300, 40]):
            prompts = [[draw.randrange(3, 100) for _ in range(n)] for n in lens]
            generator.generate(prompts, [SamplingParams(max_tokens=2 + i) for i in range(len(prompts))])
    return set(asked)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32", "deepseek_v4"])
def test_ranks_ask_for_no_other_kernels(model_type, tiny_checkpoint):
    """With weights, on the CPU, and kernels that do nothing; sums that go through NCCL, as those of much do."""
    expected = variants_of(model_type, drafts=2, gpus=2)
    of_ranks = in_ranks(2, generated, tiny_checkpoint(model_type))
    assert all(len(asked) > 20 and asked <= expected for asked in of_ranks)
    assert not of_ranks[0] <= variants_of(model_type, drafts=2)  # one GPU's alone would not do
    assert {variant for variant in expected if variant.module in (SUMS, EXPERTS)} == sums(2)
    alone = variants_of(model_type, drafts=2)
    assert not {variant for variant in alone if variant.module in (SUMS, EXPERTS)}


@pytest.mark.parametrize("gpus", [1, 2])
def test_products_of_split_experts_expect_their_share_of_the_rows(gpus, monkeypatch):
    """Kernels are compiled for these; a GPU that has all experts leaves it to the products."""
    found = record(
        monkeypatch,
        *("grouped_fp8_fp4_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"),
        seen=lambda *_, expected_rows, **__: expected_rows,
    )
    config = tiny("deepseek_v4")
    model, cache = without_memory(config, precision_of(config), gpus=gpus)
    for tokens in (1, 7):
        found.clear()
        with asked_variants("sm_90"):
            decode(model, cache, tokens, 64)
        assert {*found} == {None if gpus == 1 else -(-tokens * config.num_experts_per_tok // 2)}


@pytest.mark.parametrize("gpus", RANKS)
def test_sums_ask_for_what_is_listed(gpus, monkeypatch):
    memory = torch.empty(2, gpus, 8, 4, dtype=torch.int32, device=META)
    handle = SimpleNamespace(get_buffer=lambda *_: memory)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda *_: handle)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: gpus)
    with asked_variants("sm_90") as asked:
        OneShotSum(None, memory)
    assert asked.keys() == sums(gpus)
