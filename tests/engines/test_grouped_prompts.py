"""Warm-up compiles the kernels that compute adjacent tokens of a long prompt together. They exist for at most 16 heads
per GPU."""

import dataclasses

import pytest
import torch

from dsa.runtime.asked_variants import asked_variants
from dsa_engines.grouped_prompts import grouped_prompt
from dsa_engines.sglang import warm_up as sglang
from dsa_engines.sglang.layouts import Model
from dsa_engines.vllm import warm_up as vllm
from dsa_engines.vllm.models import Calls

GROUPED = {"compile_selection_union", "compile_sparse_mla_union", "compile_sparse_mla_queued"}


def of_sglang(heads, query_dim):
    fields = {"topk": 16, "index_heads": 64, "keys": 300, "next_n": 1, "fp8_cache": True}
    sglang._grouped_prompts(Model(heads=heads, query_dim=query_dim, **fields))


def of_vllm(heads, query_dim):
    ones = {field.name: 1 for field in dataclasses.fields(Calls)}
    vllm.grouped_prompts(Calls(**ones | {"heads": heads, "query_dim": query_dim}))


@pytest.mark.parametrize("query_dim", [576, 512])
@pytest.mark.parametrize(("heads", "size"), [(8, 8), (16, 4), (32, None), (128, None)])
@pytest.mark.parametrize("engine", [of_sglang, of_vllm])
def test_kernels_that_are_asked_for(engine, heads, size, query_dim):
    with asked_variants("sm_90") as found, torch.device("meta"):
        engine(heads, query_dim)
    variants = {variant.function: variant.arguments for variant in found}
    assert variants.keys() == (GROUPED if size else set())
    if size:
        assert variants["compile_selection_union"] == (size,)
        assert variants["compile_sparse_mla_union"] == ("bfloat16", query_dim, size)


@pytest.mark.parametrize("engine", [sglang, vllm])
def test_they_are_part_of_warming_up(engine, monkeypatch):
    seen = []
    name = "_grouped_prompts" if engine is sglang else "grouped_prompts"
    attention = "_attention" if engine is sglang else "attention"
    monkeypatch.setattr(engine, name, seen.append)
    monkeypatch.setattr(engine, attention, lambda calls: None)
    model = Model(heads=8, query_dim=576, topk=16, index_heads=64, keys=300, next_n=1, fp8_cache=True)
    engine.warm_up(model, frozenset({"attention"}), "cpu")
    assert seen == [model]


def test_none_without_a_kernel():
    """On a CPU, `grouped_prompt` returns None, because the reference would take long for such a prompt."""
    assert grouped_prompt(8, 576) is None
