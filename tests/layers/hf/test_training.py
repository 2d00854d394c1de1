"""Training on dsa's ops: gradients as in transformers' models with eager attention, indexers' losses, and refusals."""

import copy

import pytest
import torch
from transformers import DynamicCache

from dsa.testing import calc_diff
from dsa_layers import IndexerStage, SequenceBatch, load_model
from dsa_layers.hf import accelerate
from tests.layers.hf.pairs import KINDS, Adapter, assert_close_gradients, padded, pair


@pytest.fixture(scope="module", params=KINDS)
def models(request, tmp_path_factory):
    # No activation reaches this limit. The gradient of a clamp jumps at its limit, so rounding could change gradients.
    changes = {"swiglu_limit": 100.0} if request.param == "deepseek_v4" else {}
    return pair(request.param, tmp_path_factory.mktemp("model"), **changes)


def gradients(model, train=True, **arguments):
    model.zero_grad()
    model.train(train)
    loss = model(**arguments).loss
    loss.backward()
    model.eval()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def labelled(ids, mask=None):
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels} | ({} if mask is None else {"attention_mask": mask})


@pytest.mark.parametrize("length", [8, 48])
def test_gradients_of_a_batch_are_the_same_with_and_without_checkpointed_activations(models, tokens, length):
    batch = labelled(tokens[:, :length])
    (loss, got), (expected_loss, expected) = gradients(models.ours, **batch), gradients(models.theirs, **batch)
    assert (loss - expected_loss).abs() < 1e-5
    assert_close_gradients(got, expected)
    of_attention = [name for name in got if ".self_attn." in name and "indexer" not in name]
    assert of_attention and all(got[name].abs().max() > 0 for name in of_attention if length > 16)
    checkpointed = copy.deepcopy(models.ours)
    checkpointed.gradient_checkpointing_enable()
    assert_close_gradients(gradients(checkpointed, **batch)[1], expected)


def test_gradients_of_a_padded_batch_are_those_of_its_sequences(models, tokens):
    lens = [48, 5, 23]
    ids, mask = padded(tokens, lens, "right")
    _, got = gradients(models.ours, **labelled(ids, mask))
    total = {}
    for b, n in enumerate(lens):
        _, own = gradients(models.theirs, **labelled(tokens[b : b + 1, :n]))
        for name, gradient in own.items():
            total[name] = total.get(name, 0) + gradient * (n - 1) / (sum(lens) - len(lens))
    assert_close_gradients(got, total)


def test_gradients_of_adapters_are_the_same(models, tokens):
    """Attention needs the matrix of kv_b_proj. With an adapter, it applies kv_b_proj to the identity matrix."""
    ours, theirs = copy.deepcopy(models.ours), copy.deepcopy(models.theirs)
    torch.manual_seed(0)
    for layer, other in zip(ours.model.layers, theirs.model.layers):
        for name in ("q_b_proj", "kv_b_proj", "kv_proj"):
            if hasattr(layer.self_attn, name):
                adapter = Adapter(getattr(layer.self_attn, name))
                setattr(layer.self_attn, name, adapter)
                setattr(other.self_attn, name, copy.deepcopy(adapter))
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".a", ".b")))
    batch = labelled(tokens[:, :48])
    assert_close_gradients(gradients(ours, **batch)[1], gradients(theirs, **batch)[1])


def test_gradients_in_autocast_are_as_far_from_fp32_as_transformers(models, tokens):
    batch = labelled(tokens[:, :48])
    _, exact = gradients(models.theirs, **batch)
    with torch.autocast("cpu", torch.bfloat16):
        _, got = gradients(models.ours, **batch)
        _, expected = gradients(models.theirs, **batch)
        generated = models.ours.generate(tokens[:1, :20], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 24)
    names = [name for name in exact if ".self_attn." in name]
    assert {*names} <= got.keys() and {exact[name].dtype for name in names} == {torch.float32}
    ours, theirs = (torch.stack([torch.tensor(calc_diff(g[n], exact[n])) for n in names]) for g in (got, expected))
    assert ours.mean() < 2 * theirs.mean() and ours.max() < 0.5


def test_gradients_do_not_go_through_a_cache(models, tokens):
    cache = DynamicCache(config=models.ours.config)
    models.ours(tokens[:, :20], cache=cache)
    assert cache.get_seq_length() == 20
    with torch.no_grad(), pytest.raises(ValueError, match=r"after a pass with gradients the cache holds no tokens"):
        models.ours(tokens[:, 20:21], cache=cache)
    cache = DynamicCache(config=models.ours.config)
    with torch.no_grad():
        models.ours(tokens[:, :20], cache=cache)
    with pytest.raises(ValueError, match=r"cache: gradients do not reach earlier tokens"):
        models.ours(tokens[:, 20:21], cache=cache)


@pytest.mark.parametrize("name", ["warmup", "sparse"])
def test_indexers_learn_as_those_of_our_own_model(name, tokens, tmp_path):
    models = pair("deepseek_v32", tmp_path)
    own = load_model(tmp_path, dtype=torch.float32, trainable=True, progress=False)
    losses, found = [], []
    passes = (
        (models.ours, lambda: models.ours(tokens[:2, :40])),
        (own, lambda: own(tokens[:2, :40].flatten(), SequenceBatch.without_cache([40, 40]))),
    )
    for model, run in passes:
        with IndexerStage(model, name) as stage:
            run()
            loss = stage.loss()
            loss.backward()
            losses.append(loss.detach())
            found.append([parameter.grad for parameter in stage.parameters()])
    assert torch.allclose(*losses, rtol=1e-5) and losses[0] > 0
    for got, expected in zip(*found, strict=True):
        assert (got - expected).abs().max() <= 1e-4 * expected.abs().max() and got.abs().max() > 0


def test_dropout_is_refused(tokens, tmp_path):
    models = pair("deepseek_v32", tmp_path, attention_dropout=0.1)
    accelerate(models.ours).train()
    with pytest.raises(ValueError, match=r"attention_dropout: must be 0 in training, got 0\.1"):
        models.ours(tokens)
    models.ours.eval()(tokens)
