"""The stacks of the whole-model benchmark: small ones of the same fields, on the CPU."""

import pytest
import torch

from dsa_bench.e2e import runs
from dsa_bench.e2e.runs import decode, prefill
from dsa_bench.e2e.stacks import STACKS, skeleton, stack
from dsa_layers.batch.prefill import Chunk
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.layers.moe import MoE

SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8, "vocab_size": 512, "q_lora_rank": 128}
SMALL |= {"num_experts_per_tok": 2}
FEWER = {
    "V3.2": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "n_group": 2,
        "topk_group": 1,
    },
    "V4-Flash": {"num_attention_heads": 8, "o_groups": 2, "o_lora_rank": 128},
    "GLM-5": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}


@pytest.mark.parametrize("name", STACKS)
def test_logits_are_of_order_one(name):
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    with torch.inference_mode():
        logits = model(torch.arange(300), SequenceBatch.without_cache([300]), all_tokens=True)
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    # Tokens matter, and so do the layers' weights.
    assert logits.std(0).mean() > 0.1


@pytest.mark.parametrize("name", STACKS)
def test_every_kind_of_layer_in_little_enough_for_one_gpu(name):
    model = skeleton(name)
    assert 20e9 < sum(tensor.nbytes for tensor in model.state_dict().values()) < 60e9
    if name == "V4-Flash":
        assert len(set(model.config.layer_types)) == 3
    else:
        assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == [False, True, True, True]


@pytest.mark.parametrize("name", STACKS)
def test_runs(name):
    """They are passes of the model: the prompts' last chunk, and a step over caches without a NaN."""
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    prefill(model, 1, 70, 32).timed()
    run = decode(model, 3, 300)
    logits = run.timed()
    assert logits.shape == (3, 512) and logits.isfinite().all()
    assert torch.equal(run.launched(), logits)


def test_prompts_fill_passes(monkeypatch):
    """They are cut where a pass is full, and go on in the next, behind what is cached of them."""
    passes = []
    batch = runs.prefill_batch
    monkeypatch.setattr(runs, "prefill_batch", lambda chunks, *rest: passes.append(chunks) or batch(chunks, *rest))
    logits = prefill(stack("V3.2", "cpu", **SMALL, **FEWER["V3.2"]), 3, 70, 100).timed()
    pages = [range(0, 2), range(2, 4), range(4, 6)]
    assert passes == [
        [Chunk(70, 0, pages[0], 0), Chunk(30, 0, pages[1], 1)],
        [Chunk(40, 30, pages[1], 1), Chunk(60, 0, pages[2], 2)],
        [Chunk(10, 60, pages[2], 2)],
    ]
    assert logits.shape == (1, 512)


def test_fp4_experts_stay_so_unless_they_are_widened():
    held = {
        widen: sum(
            t.nbytes
            for name, t in skeleton("V4-Flash", widen_experts=widen).state_dict().items()
            if ".experts." in name
        )
        for widen in (False, True)
    }
    assert 1.8 < held[True] / held[False] < 2
