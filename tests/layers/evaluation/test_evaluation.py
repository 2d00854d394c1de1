"""Loss on held-out text, keys that tokens read, and other selections with the same weights."""

import pytest
import torch

from dsa_layers import SHIPPED_MODEL, Generator, SamplingParams, SequenceBatch, load_model
from dsa_layers.evaluation.held_out_loss import held_out_loss
from dsa_layers.evaluation.keys_read import KeysRead
from dsa_layers.evaluation.selections import all_keys, latest_keys
from dsa_layers.tiny import write_tiny_checkpoint

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
    for chunk in (2048, 299, 64):  # 299 would leave one token
        result = held_out_loss(model, sequences, chunk=chunk)
        assert result.loss == pytest.approx(expected, rel=1e-5) and result.tokens == 449 and result.seconds > 0


def test_wrong_sequences(model):
    for wrong in ([], [[1]]):
        with pytest.raises(ValueError, match="sequences: must be lists of at least 2 tokens, got lengths"):
            held_out_loss(model, wrong)


def test_all_keys_is_dense_attention(model, sequences):
    """That of the same weights in a model that selects as many keys as there are."""
    tokens = sequences[0]
    selected = logits_of(model, tokens)
    with all_keys(model, len(tokens)), KeysRead(model) as keys:
        dense = logits_of(model, tokens)
    assert (keys.counts().most_read, keys.counts().longest_context) == (301, 301) and keys.counts().share == 1
    torch.testing.assert_close(dense[:TOP_K], selected[:TOP_K], atol=1e-3, rtol=0)
    assert (dense - selected)[TOP_K:].abs().max() > 1e-2
    for layer in model.model.layers:
        layer.self_attn.indexer.top_k = 301
    try:
        torch.testing.assert_close(logits_of(model, tokens), dense, atol=0, rtol=0)
    finally:
        for layer in model.model.layers:
            layer.self_attn.indexer.top_k = TOP_K
    torch.testing.assert_close(logits_of(model, tokens), selected, atol=0, rtol=0)


def test_the_latest_keys_are_a_window(model, sequences):
    """Earlier tokens do not change with a later one; others do, through three layers; short contexts are whole."""
    tokens = sequences[0]
    with latest_keys(model), KeysRead(model) as keys:
        window = logits_of(model, tokens)
        changed = logits_of(model, [*tokens[:100], (tokens[100] + 1) % 256, *tokens[101:]])
    assert keys.counts().most_read == TOP_K
    assert torch.equal(changed[:100], window[:100]) and (changed - window)[100:].abs().amax(-1).min() > 0
    selected = logits_of(model, tokens)  # by the indexers again
    torch.testing.assert_close(selected[:TOP_K], window[:TOP_K], atol=1e-3, rtol=0)
    assert (selected - window)[TOP_K:].abs().max() > 1e-2


def test_the_window_of_one_layer(model, sequences):
    """The keys that the first layer reads: by what its output depends on."""
    attention, seen = model.model.layers[0].self_attn, {}
    hook = attention.register_forward_hook(lambda layer, args, out: seen.setdefault(len(seen), out))
    tokens = sequences[0]
    try:
        with latest_keys(model):
            logits_of(model, tokens)
            logits_of(model, [*tokens[:100], (tokens[100] + 1) % 256, *tokens[101:]])
    finally:
        hook.remove()
    differs = (seen[0] != seen[1]).any(-1).nonzero()[:, 0]
    assert (differs.min(), differs.max()) == (100, 100 + TOP_K - 1)


def test_keys_are_counted_in_every_pass(model):
    """Of prompts in chunks and of decoding, of two sequences of different length."""
    generator = Generator(model, cache_tokens=1024, prefill_chunk=100, cuda_graphs=False)
    with KeysRead(model) as keys:
        generator.generate([[65] * 150, [66] * 20], SamplingParams(max_new_tokens=6))
    contexts = [*range(1, 156), *range(1, 26)]
    counts = keys.counts()
    assert counts.context == pytest.approx(sum(contexts) / len(contexts))
    assert counts.read == pytest.approx(sum(min(n, TOP_K) for n in contexts) / len(contexts))
    assert (counts.most_read, counts.longest_context) == (TOP_K, 155)
    generator.generate([[65] * 150], SamplingParams(max_new_tokens=2))
    assert keys.counts() == counts  # it has ended


def test_nothing_counted(model):
    with KeysRead(model) as keys, pytest.raises(RuntimeError, match="counts: no pass was counted"):
        keys.counts()
    for wrong in (KeysRead, latest_keys(torch.nn.Linear(2, 2)).__enter__):
        with pytest.raises(ValueError, match="model: must have"):
            wrong(torch.nn.Linear(2, 2)) if wrong is KeysRead else wrong()


def test_keys_of_windows_and_entries(tmp_path):
    """DeepSeek-V4: the window's tokens, and of the entries those that the indexer selects, or all that are complete."""
    write_tiny_checkpoint(tmp_path, model="deepseek_v4")
    model = load_model(tmp_path, dequantize=True, progress=False)
    config, length = model.config, 300
    tokens = torch.arange(length) % 50

    def expected(selected):
        read = 0
        for kind in config.layer_types:
            ratio = config.compress_rates.get(kind)
            for seen in range(1, length + 1):
                entries = 0 if ratio is None else seen // ratio
                indexed = kind == "compressed_sparse_attention"
                read += min(seen, config.sliding_window) + (min(entries, selected) if indexed else entries)
        return read / length / config.num_hidden_layers

    for context, selected in ((KeysRead(model), config.index_topk), (all_keys(model, length), length)):
        with context, KeysRead(model) as keys, torch.no_grad():
            model(tokens, SequenceBatch.without_cache([length]))
        assert keys.counts().read == pytest.approx(expected(selected))
    assert expected(length) > expected(config.index_topk)
