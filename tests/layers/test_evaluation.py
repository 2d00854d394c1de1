"""Tests of dsa_layers.evaluation: loss on held-out text, keys per token, and dense and windowed attention."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dsa_layers import SHIPPED_MODEL, SequenceBatch, load_model
from dsa_layers.evaluation import all_keys, held_out_loss, keys_read, latest_keys

TOP_K = 128


@pytest.fixture(scope="module")
def model():
    return load_model(SHIPPED_MODEL, dequantize=True, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def sequences():
    return torch.randint(256, (2, 301), generator=torch.Generator().manual_seed(0)).tolist()


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens), SequenceBatch.without_cache([len(tokens)]), all_tokens=True)


def test_the_loss_is_that_of_one_pass_over_each_sequence(model, sequences):
    sequences = [sequences[0], sequences[1][:150]]
    losses = [
        torch.nn.functional.cross_entropy(logits_of(model, tokens[:-1]), torch.tensor(tokens[1:]), reduction="sum")
        for tokens in sequences
    ]
    expected = torch.stack(losses).sum().item() / (300 + 149)
    for chunk in (2048, 299, 64):  # 299: two parts of 150, because a part of one token would be a decoding pass
        assert held_out_loss(model, sequences, chunk=chunk) == pytest.approx(expected, rel=1e-5)


def test_all_keys_is_attention_of_a_model_that_selects_as_many_keys_as_there_are(model, sequences):
    tokens = sequences[0]
    selected = logits_of(model, tokens)
    with all_keys(model, len(tokens)):
        dense = logits_of(model, tokens)
        assert keys_read(model, len(tokens)).share == 1
    torch.testing.assert_close(dense[:TOP_K], selected[:TOP_K], atol=1e-3, rtol=0)
    assert (dense - selected)[TOP_K:].abs().max() > 1e-2
    for top_k, expected in ((301, dense), (TOP_K, selected)):
        for layer in model.model.layers:
            layer.self_attn.indexer.top_k = top_k
        torch.testing.assert_close(logits_of(model, tokens), expected, atol=0, rtol=0)


def test_the_latest_keys_are_a_window(model, sequences):
    tokens, seen = sequences[0], []
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda layer, args, out: seen.append(out[0]))
    with latest_keys(model):
        window = logits_of(model, tokens)
        logits_of(model, [*tokens[:100], (tokens[100] + 1) % 256, *tokens[101:]])
    hook.remove()
    assert (seen[0] != seen[1]).any(-1).nonzero()[:, 0].tolist() == [*range(100, 100 + TOP_K)]
    selected = logits_of(model, tokens)
    torch.testing.assert_close(selected[:TOP_K], window[:TOP_K], atol=1e-3, rtol=0)
    assert (selected - window)[TOP_K:].abs().max() > 1e-2


def test_deepseek_v4_reads_the_same_latest_entries_token_by_token_as_in_one_pass(tiny_checkpoint):
    model = load_model(tiny_checkpoint("deepseek_v4"), dequantize=True, dtype=torch.float32, progress=False)
    for layer in model.layers:
        if layer.attn.indexer is not None:
            layer.attn.indexer.top_k = 2
    tokens = [(7 * i) % 50 for i in range(17)]
    with latest_keys(model):
        by_token, at_once = (held_out_loss(model, [tokens], chunk=chunk) for chunk in (1, 16))
    assert by_token == pytest.approx(at_once, rel=1e-5) != pytest.approx(held_out_loss(model, [tokens]), rel=1e-5)


LATEST = [[0, -1], [0, 1], [1, 2], [2, 3]]  # the latest two keys that each of four tokens sees; -1: no key


def select_first(x, qr, rope, batch, cache=None, *, depth):
    return torch.zeros(len(x), 2, dtype=torch.int32)


class Other(nn.Module):
    """An attention layer of a class outside dsa_layers. It returns what its indexer selects."""

    def __init__(self):
        super().__init__()
        self.indexer = SimpleNamespace(top_k=2, select=select_first)

    def selectable(self, batch):
        return batch

    def forward(self, tokens, batch):
        return self.indexer.select(tokens, None, None, batch, None, depth=3)


@pytest.mark.parametrize("wrap", [nn.Sequential, checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_contexts_change_attention_of_another_class_in_wrappers_and_restore_it(wrap):
    attention, tokens, batch = Other(), torch.arange(4), SequenceBatch.without_cache([4])
    layer = attention if wrap is nn.Sequential else wrap(attention)
    model = nn.Sequential(layer)
    with latest_keys(model):
        with latest_keys(model):
            assert layer(tokens, batch).tolist() == LATEST
        assert layer(tokens, batch).tolist() == LATEST
    assert layer(tokens, batch).tolist() == [[0, 0]] * 4
    with all_keys(model, 4):
        assert attention.indexer.top_k == 4
    assert attention.indexer.top_k == 2


def test_models_without_attention_or_indexers_are_refused():
    message = "model: must have attention layers with an `indexer`, got Linear without such a layer"
    for context in (latest_keys, partial(all_keys, longest=4)):
        with pytest.raises(ValueError, match=message), context(nn.Linear(2, 2)):
            pass
    with pytest.raises(ValueError, match="model: must have attention layers of dsa_layers, got Linear without one"):
        keys_read(nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match="length: must be at least 1, got 0"):
        keys_read(nn.Linear(2, 2), 0)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_token_reads_as_many_keys_as_its_indexer_selects(tiny_checkpoint, family):
    model, length, seen = load_model(tiny_checkpoint(family), progress=False), 300, []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda layer, args, out: seen.append(out[1]))
    logits_of(model, [7 * i % 50 for i in range(length)])
    selected = [one.indices("positions", one.batch) for one in seen]
    counts = keys_read(model, length)
    assert counts.read == torch.stack([(one >= 0).sum() for one in selected]).double().mean() / length
    assert counts.dense == counts.context == (length + 1) / 2


def test_keys_of_layers_with_a_window_and_of_drafters(tiny_checkpoint):
    counts = [
        keys_read(load_model(tiny_checkpoint("dots3_note"), drafter=drafter, progress=False), 300)
        for drafter in (False, True)
    ]
    window, selected, seen = (sum(min(i, most) for i in range(1, 301)) / 300 for most in (96, 128, 300))
    assert counts[0] == counts[1]
    assert counts[0].read == pytest.approx((window + selected) / 2)
    assert counts[0].dense == pytest.approx((window + seen) / 2)


def test_keys_of_deepseek_v4_are_the_window_s_tokens_and_selected_or_complete_entries(tiny_checkpoint):
    model = load_model(tiny_checkpoint("deepseek_v4"), dequantize=True, progress=False)
    config, length = model.config, 280

    def expected(selected):
        read = 0
        for kind in config.layer_types:
            ratio = config.compress_rates.get(kind)
            for seen in range(1, length + 1):
                entries = 0 if ratio is None else seen // ratio
                indexed = kind == "compressed_sparse_attention"
                read += min(seen, config.sliding_window) + (min(entries, selected) if indexed else entries)
        return read / length / config.num_hidden_layers

    sparse, latest, dense = contextlib.nullcontext(), latest_keys(model), all_keys(model, length)
    for context, selected in ((sparse, config.index_topk), (latest, config.index_topk), (dense, length)):
        with context:
            counts = keys_read(model, length)
        assert counts.read == pytest.approx(expected(selected)) and counts.dense == pytest.approx(expected(length))
        assert counts.context == (length + 1) / 2
        assert counts.share == counts.read / counts.dense
    assert expected(length) > expected(config.index_topk)
