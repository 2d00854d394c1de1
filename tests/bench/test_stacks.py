"""The stacks of dsa_bench/e2e: small stacks on a CPU, and stacks of real sizes without storage."""

import pytest
import torch

import dsa
from dsa_bench.e2e import runs
from dsa_bench.e2e.runs import decode, fill, prefill
from dsa_bench.e2e.stacks import LONG_STACKS, STACKS, published_layers, skeleton, with_layers
from dsa_layers.batch.sequence_batch import Chunk, SequenceBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.layers.moe import MoE
from dsa_layers.models.family import published_config
from dsa_layers.parallel.ranks import Ranks
from tests.bench.small_stacks import small_stack
from tests.layers.parallel.ways import WAYS, split_by

by_stack = pytest.mark.parametrize("name", STACKS)


@by_stack
def test_prompts_and_steps_have_finite_logits_of_order_one(name):
    model = small_stack(name)
    with torch.inference_mode():
        logits = model(torch.arange(300), SequenceBatch.without_cache([300]), all_tokens=True)
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    assert logits.std(0).mean() > 0.1
    assert prefill(model, 1, 70, 32).timed().isfinite().all()
    run = decode(model, 3, 300)
    logits = run.timed()
    assert logits.shape == (3, 512) and logits.isfinite().all()
    assert torch.equal(run.launched(), logits)


@pytest.mark.parametrize("name", STACKS | LONG_STACKS)
def test_a_stack_has_every_kind_of_layer_and_fits_on_one_gpu(name):
    model = skeleton(name)
    assert 20e9 < sum(tensor.nbytes for tensor in model.state_dict().values()) < 60e9
    if name == "V4-Flash":
        assert len(set(model.config.layer_types)) == 3
        return
    layers, selects = model.model.layers, [True, *[name != "GLM-5.2"] * 3]
    assert [isinstance(layer.mlp, MoE) for layer in layers] == [False, True, True, True]
    assert [layer.self_attn.indexer is not None for layer in layers] == selects
    if name == "GLM-5.2":
        assert model.config.max_position_embeddings == 2**20 and model.config.rope.theta == 8e6


def test_a_full_pass_cuts_a_prompt_which_the_next_pass_continues(recorded):
    passes = recorded(runs, "prefill_batch")
    logits = prefill(small_stack("V3.2"), 3, 70, 100).timed()
    pages = [range(0, 2), range(2, 4), range(4, 6)]
    assert [chunks for chunks, *_ in passes] == [
        [Chunk(70, 0, pages[0], 0), Chunk(30, 0, pages[1], 1)],
        [Chunk(40, 30, pages[1], 1), Chunk(60, 0, pages[2], 2)],
        [Chunk(10, 60, pages[2], 2)],
    ]
    assert logits.shape == (1, 512)


def test_fp4_experts_stay_fp4_unless_they_are_widened():
    def held(widen):
        weights = skeleton("V4-Flash", widen_experts=widen).state_dict().items()
        return sum(tensor.nbytes for name, tensor in weights if ".experts." in name)

    assert 1.8 < held(True) / held(False) < 2


@by_stack
def test_more_layers_have_the_published_proportions(name):
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


@by_stack
@pytest.mark.parametrize("way", WAYS)
def test_parts_differ_between_ranks_and_whole_tensors_do_not(name, way):
    with split_by(way):
        ranks = (Ranks(0, 1), Ranks(0, 2), Ranks(1, 2))
        one, *parts = (small_stack(name, ranks=rank).state_dict() for rank in ranks)
    shared = {key for key in one if one[key].shape != parts[0][key].shape}
    assert any("experts" in key for key in shared)
    assert any("q_b" in key for key in shared) is (way == "heads")
    for key in one:
        whole, *of_ranks = (state[key].contiguous().view(torch.uint8) for state in (one, *parts))
        if key not in shared:
            assert all(torch.equal(part, whole) for part in of_ranks), key
        elif len(one[key].float().unique()) > 1:
            assert not torch.equal(*of_ranks), key
        size = one[key].float().square().mean()
        assert all((part[key].float().square().mean() - size).abs() <= 0.2 * size for part in parts), key


def is_normal(rows):
    return rows.isfinite().all() and 0.9 < rows.std() < 1.1 and len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("kind", ["fp8", torch.bfloat16])
def test_filled_pages_hold_normal_numbers(kind):
    cache = PagedKVCache(2, 3, 64, latent=kind, index=kind)
    fill(cache)
    slots = torch.arange(3 * 64)
    for layer in map(cache.layer, range(2)):
        assert is_normal(dsa.read_kv_cache(layer.latent, slots))
        if kind == "fp8":
            keys, scales = dsa.read_indexer_cache(layer.index, slots)
            assert is_normal(keys.float() * scales[:, None])
        else:
            assert is_normal(layer.index.flatten(0, 2).float())


def test_filled_states_of_compressed_attention_are_small():
    cache = small_stack("V4-Flash").make_cache(4, state_slots=2)
    fill(cache)
    states = [tensor for tensor in cache.state_tensors() if tensor.dtype == torch.float32]
    others = [tensor for tensor in cache.tensors() if tensor.dtype != torch.float32]
    assert states and all(0 < tensor.std() < 0.01 for tensor in states)
    assert all(tensor.view(torch.uint8).float().std() > 10 for tensor in others)
