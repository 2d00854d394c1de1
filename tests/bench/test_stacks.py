"""The stacks of the whole-model benchmark: small ones of the same fields, on the CPU."""

import pytest
import torch

from dsa_bench.e2e import runs
from dsa_bench.e2e.runs import decode, prefill
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack, with_layers
from dsa_layers.batch.prefill import Chunk
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.families.published import published_config
from dsa_layers.layers.moe import MoE
from dsa_layers.parallel.ranks import Ranks
from tests.bench.small_stacks import FEWER, SMALL
from tests.layers.parallel.ways import WAYS, split_by


@pytest.mark.parametrize("name", STACKS)
def test_runs_are_passes_of_a_model_whose_logits_are_of_order_one(name):
    """A prompt without a cache, one in two passes, and a step over caches without a NaN."""
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    with torch.inference_mode():
        logits = model(torch.arange(300), SequenceBatch.without_cache([300]), all_tokens=True)
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    # Tokens matter, and so do the layers' weights.
    assert logits.std(0).mean() > 0.1
    assert prefill(model, 1, 70, 32).timed().isfinite().all()
    run = decode(model, 3, 300)
    logits = run.timed()
    assert logits.shape == (3, 512) and logits.isfinite().all()
    assert torch.equal(run.launched(), logits)


@pytest.mark.parametrize("name", STACKS)
def test_every_kind_of_layer_in_little_enough_for_one_gpu(name):
    model = skeleton(name)
    assert 20e9 < sum(tensor.nbytes for tensor in model.state_dict().values()) < 60e9
    if name == "V4-Flash":
        assert len(set(model.config.layer_types)) == 3
    else:
        assert [isinstance(layer.mlp, MoE) for layer in model.model.layers] == [False, True, True, True]


def test_prompts_fill_passes(monkeypatch):
    """They are cut where a pass is full, and go on in the next, after their cached tokens."""
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
    def held(widen):
        weights = skeleton("V4-Flash", widen_experts=widen).state_dict().items()
        return sum(tensor.nbytes for name, tensor in weights if ".experts." in name)

    assert 1.8 < held(True) / held(False) < 2


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_more_layers(name):
    """All layers are the published ones, and fewer have every kind."""
    published = published_config(STACKS[name][0])
    for layers in (3, 5, 17, published_layers(name)):
        config = skeleton(name, **with_layers(name, layers)).config
        assert config.num_hidden_layers == layers
        if name == "V4-Flash":
            assert sum(config.hash_layers) == max(1, round(3 * layers / 43)) and len(set(config.layer_types)) == 3
        else:
            assert config.first_k_dense_replace == max(1, round(3 * layers / published_layers(name)))
    fields = with_layers(name, published_layers(name))
    ratios = fields.pop("compress_ratios", None)
    assert fields == {key: published[key] for key in fields}
    assert ratios == (published["compress_ratios"][:43] if name == "V4-Flash" else None)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("way", WAYS)
def test_parts_of_a_stack(name, way):
    """What ranks share differs between them, what they do not is the same, and both are as large as those of one."""
    with split_by(way):
        one, *parts = (
            stack(name, "cpu", ranks=Ranks(rank, size), **SMALL, **FEWER[name]).state_dict()
            for rank, size in ((0, 1), (0, 2), (1, 2))
        )
    shared = {key for key in one if one[key].shape != parts[0][key].shape}
    assert any("experts" in key for key in shared)
    assert any("q_b" in key for key in shared) is (way == "heads")
    for key in one:
        of_ranks = [part[key].contiguous().view(torch.uint8) for part in parts]
        if key not in shared:
            assert all(torch.equal(of_rank, one[key].contiguous().view(torch.uint8)) for of_rank in of_ranks), key
        elif len(one[key].float().unique()) > 1:
            assert not torch.equal(*of_ranks), key
        size = one[key].float().square().mean()
        assert all((part[key].float().square().mean() - size).abs() <= 0.2 * size for part in parts), key
