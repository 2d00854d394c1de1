"""`IndexerStage`: the parameters that each loss reaches; learning; checkpointing; refusals. Also `next_tokens`."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from dsa_layers import DSAAttention, IndexerStage, LightningIndexer, Ranks, SequenceBatch, load_model, next_tokens
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from dsa_layers.parallel.ranks import ALONE
from dsa_layers.training import STAGES
from tests.reference.common import assert_refused


class Small(nn.Module):
    """Two attention layers over embedded tokens."""

    def __init__(self, top_k):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(self._layer(top_k) for _ in range(2))
        self.rotary = RotaryEmbedding(rope_frequencies(16, 1e4))

    def _layer(self, top_k):
        indexer = LightningIndexer(64, 32, n_heads=4, head_dim=32, top_k=top_k, quantize=False)
        return DSAAttention(64, 4, indexer, q_lora_rank=32, kv_lora_rank=32, nope_dim=16, rope_dim=16, v_dim=16)

    def forward(self, tokens, batch):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, *self.rotary(batch.positions), batch)[0]
        return x


@pytest.fixture(params=STAGES)
def name(request):
    return request.param


def inputs():
    torch.manual_seed(1)
    return torch.randint(50, (33,)), SequenceBatch.without_cache([20, 13])


@pytest.mark.parametrize("name, top_k", [("warmup", 100), ("sparse", 6)])
def test_passes_are_those_of_inference(name, top_k):
    model, (tokens, batch) = Small(top_k), inputs()
    expected = model(tokens, batch)
    with IndexerStage(model, name) as stage:
        got = model(tokens, batch)
        assert stage.loss() > 0
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(model(tokens, batch), expected)


def test_layers_with_a_window_have_no_loss(name, tiny_checkpoint):
    options = {"trainable": True, "dequantize": True, "dtype": torch.float32, "progress": False}
    model, tokens = load_model(tiny_checkpoint("dots3_note"), **options), torch.arange(200)
    with IndexerStage(model, name) as stage:
        model(tokens, SequenceBatch.without_cache([150, 50]))
        stage.loss().backward()
    learning = {name.split(".")[2] for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {"0", "2"}


def test_sequences_of_one_length_attend_densely_as_by_themselves():
    """With gradients, one attention call computes all sequences of this batch. Without gradients, each has a call."""
    model, (tokens, _) = Small(100), inputs()
    batch = SequenceBatch.without_cache([11, 11, 11])
    got = model(tokens, batch)
    got.square().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "indexer" not in n)
    with torch.no_grad():
        assert torch.allclose(got, model(tokens, batch), atol=1e-5)


def test_two_losses_reach_different_parameters(name):
    model, (tokens, batch) = Small(6), inputs()
    with IndexerStage(model, name) as stage:
        out = model(tokens, batch)
        loss, learned = stage.loss(), stage.parameters()
        others = [p for n, p in model.named_parameters() if "indexer" not in n]
        assert len(learned) + len(others) == len(list(model.parameters()))
        options = {"allow_unused": True, "retain_graph": True}
        assert all(g.any() for g in torch.autograd.grad(loss, learned, retain_graph=True))
        assert torch.autograd.grad(loss, others, **options) == (None,) * len(others)
        assert torch.autograd.grad(out.square().sum(), learned, **options) == (None,) * len(learned)
        assert all(g is not None for g in torch.autograd.grad(out.square().sum(), others))


def test_the_indexers_learn(name):
    model, (tokens, batch) = Small(6), inputs()
    stage, losses = IndexerStage(model, name), []
    optimizer = torch.optim.Adam(stage.parameters(), lr=6e-3)
    with stage:
        for _ in range(30):
            model(tokens, batch)
            losses.append(stage.loss())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


def test_other_stages_and_models_without_an_indexer_per_layer_are_refused():
    model = Small(6)
    assert_refused("name: must be one of warmup, sparse, got 'dense'", IndexerStage, model, "dense")
    assert_refused("drafter: must be True or False, got 1", IndexerStage, model, "sparse", drafter=1)
    without = "model: must have attention layers .* which train their indexers .*, got Linear without such a layer"
    assert_refused(without, IndexerStage, nn.Linear(2, 2), "warmup")
    with pytest.raises(RuntimeError, match="loss: no pass since"):
        IndexerStage(model, "warmup").loss()
    for indexer, got in ((nn.ReLU(), "ReLU"), (None, "NoneType")):  # None: shares another layer's selection
        model.layers[1].indexer = indexer
        message = f"model: each attention layer must have an indexer of its own, with a method `loss`, got {got}"
        assert_refused(message, IndexerStage, model, "sparse")


def test_a_drafter_is_left_out_unless_asked_for(name):
    """A pass of the model does not run the drafter, so the drafter's indexer would get no gradient."""
    model, (tokens, batch) = Small(6), inputs()
    model.drafter = model._layer(6)
    wrapped = nn.Sequential(model)  # a wrapper like DDP
    of_model = [p for layer in model.layers for p in layer.indexer.parameters()]
    with IndexerStage(wrapped, name) as stage:
        model(tokens, batch)
        stage.loss().backward()
        assert model.drafter.indexer_stage is None
    assert stage.parameters() == of_model and all(p.grad is not None for p in of_model)
    stage = IndexerStage(wrapped, name, drafter=True)
    assert {*stage.parameters()} == {*of_model, *model.drafter.indexer.parameters()}
    with stage:
        model.drafter(model(tokens, batch), *model.rotary(batch.positions), batch)
        stage.loss().backward()
    assert all(p.grad is not None for p in stage.parameters())


def test_a_drafter_that_is_left_out_refuses_a_share(checkpoint):
    model = load_model(checkpoint, dtype=torch.float32, dequantize=True, trainable=True, drafter=True, progress=False)
    tokens = torch.arange(31)
    for drafter in (False, True):
        with IndexerStage(model, "sparse", drafter=drafter) as stage:
            share = stage.share([20, 10], ALONE)
            states = model.states(share.own(tokens[:-1]), share)
            if drafter:
                model.drafter(share.own(tokens[1:]), states, share)
                stage.loss().backward()
                assert all(p.grad is not None for p in stage.parameters())
            else:
                with pytest.raises(ValueError, match=r"^batch: a rank's share .* IndexerStage\(\.\., drafter=True\)"):
                    model.drafter(share.own(tokens[1:]), states, share)


def test_checkpointed_activations(name, monkeypatch):
    model, (tokens, batch) = Small(6), inputs()

    def gradients():
        with IndexerStage(model, name) as stage:
            out = model(tokens, batch)
            (out.square().mean() + stage.loss()).backward()
            found = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        return found

    expected = gradients()
    forward = DSAAttention.forward
    monkeypatch.setattr(DSAAttention, "forward", lambda *a: checkpoint(forward, *a, use_reentrant=False))
    for _ in range(2):
        for got, other in zip(gradients(), expected):
            assert torch.allclose(got, other, atol=1e-6)


def test_reentrant_checkpoints_are_refused(name, monkeypatch):
    """Reentrant checkpoints run the forward pass without gradients, so the indexers would learn nothing."""
    model, (tokens, batch) = Small(6), inputs()
    forward = DSAAttention.forward
    monkeypatch.setattr(DSAAttention, "forward", lambda *a: checkpoint(forward, *a, use_reentrant=True))
    with pytest.raises(RuntimeError, match=r"loss: a pass .* ran without gradients, .* use_reentrant=False"):
        with IndexerStage(model, name) as stage:
            model(tokens, batch)
            stage.loss()


def test_a_pass_without_gradients_is_not_summed_with_one_that_trains():
    model, (tokens, batch) = Small(6), inputs()
    with IndexerStage(model, "sparse") as stage:
        with torch.no_grad():
            model(tokens, batch)
            expected = pytest.approx(stage.loss().item(), rel=1e-6)
            model(tokens, batch)
        model(tokens, batch)
        with pytest.raises(RuntimeError, match=r"loss: a pass .* under torch.no_grad\(\)"):
            stage.loss()
        model(tokens, batch)
        assert stage.loss().item() == expected  # the refused losses were dropped
        with torch.no_grad():
            model(tokens, batch)
    with stage:  # entering drops losses without gradients, here those of the pass above
        model(tokens, batch)
        assert stage.loss().item() == expected
    with torch.no_grad(), stage:
        model(tokens, batch)
    assert stage.loss().item() == expected  # outside the `with` block, losses without gradients are allowed


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda layer: torch.compile(layer, backend="eager")])
def test_wrapped_layers_are_found_once(wrap):
    model, (tokens, batch) = Small(6), inputs()
    expected = IndexerStage(model, "sparse").parameters()
    with IndexerStage(model, "sparse") as stage:
        model(tokens, batch)
        loss = stage.loss()
    layers = list(model.layers)
    model.layers = nn.ModuleList(map(wrap, layers))
    stage = IndexerStage(model, "sparse")
    assert list(map(id, stage.parameters())) == list(map(id, expected))
    with stage, torch.compiler.set_stance("force_eager"):  # run the wrappers, without compiling
        assert [layer.indexer_stage for layer in layers] == [stage, stage]
        model(tokens, batch)
        assert torch.allclose(stage.loss(), loss)
    assert [layer.indexer_stage for layer in layers] == [None, None]


@pytest.mark.parametrize("parameter", ["wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.bias"])
def test_an_indexer_without_numbers_has_no_loss(name, parameter):
    """For a token without keys, the loss op returns 0, as for a perfect indexer; `SparseAttention` makes it NaN."""
    model, (tokens, batch) = Small(6), inputs()
    with torch.no_grad():
        model.layers[0].indexer.get_parameter(parameter).fill_(torch.nan)
    with IndexerStage(model, name) as stage:
        model(tokens, batch)
        assert stage.loss().isnan()


def test_a_pass_that_fails_leaves_nothing():
    model, (tokens, batch) = Small(6), inputs()
    stage = IndexerStage(model, "sparse")
    with pytest.raises(ZeroDivisionError), stage:
        model(tokens, batch)
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="loss: no pass"):
        stage.loss()


def test_the_functions_of_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "train-an-indexer.md").read_text()
    (code,) = re.findall(r"## In an attention of your own\n.*?```python\n(.*?)```", text, re.S)
    names = {}
    exec(code, names)
    torch.manual_seed(0)
    tokens, heads = 12, 4
    x, qr = torch.randn(tokens, 512, requires_grad=True), torch.randn(tokens, 256, requires_grad=True)
    q, k, v = (torch.randn(tokens, n, d, requires_grad=True) for n, d in ((heads, 32), (2, 32), (2, 16)))
    absorbed, kv = (torch.randn(tokens, n, 576, requires_grad=True) for n in (heads, 1))
    cos, sin = RotaryEmbedding(rope_frequencies(64, 10000.0))(torch.arange(tokens))
    sequences = torch.tensor([0, 7, 12], dtype=torch.int32), 7
    dense, dense_loss = names["warmup"](x, qr, q, k, v, cos, sin, *sequences)
    chosen, sparse_loss = names["sparse"](x, qr, absorbed, kv, cos, sin, *sequences, 0.05)
    assert dense.shape == (tokens, heads, 16) and chosen.shape == (tokens, heads, 512)
    learned = list(names["indexer"].parameters())
    for loss in (dense_loss, sparse_loss):
        assert all(g is not None for g in torch.autograd.grad(loss, learned, retain_graph=True))
        others = torch.autograd.grad(loss, (x, qr, q, k, v, absorbed, kv), allow_unused=True, retain_graph=True)
        assert all(g is None or not g.any() for g in others)


def test_the_documented_model_learns():
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "train-an-indexer.md").read_text()
    (code,) = re.findall(r"## In a model of your own\n.*?```python\n(.*?)```", text, re.S)
    names = {}
    exec(code, names)
    assert names["losses"][-1] < names["losses"][0] / 2
    assert all(p.grad is not None and p.grad.any() for p in names["model"].parameters())


def test_the_example_of_the_docstring():
    example = re.search(r"\n\n((?: {8}.*\n|\n)+)", IndexerStage.__doc__)[1]
    names = {}
    exec(textwrap.dedent(example), names)
    learned = [p for p in names["model"].parameters() if p.requires_grad]
    assert learned and names["model"].training
    assert all(p.grad is not None and p.grad.any() for p in learned)


TOKENS = torch.arange(10, 17)
BATCH = SequenceBatch.without_cache([3, 1, 3])


def test_a_sequence_s_last_token_has_no_target():
    expected = [11, 12, -100, -100, 15, 16, -100]
    share = IndexerStage(Small(6), "sparse").share([3, 1, 3], Ranks(0, 1))
    for batch in (BATCH, share):
        assert next_tokens(TOKENS, batch).tolist() == expected
    assert next_tokens(TOKENS[:0], SequenceBatch.without_cache([])).tolist() == []
    assert share.mean(torch.tensor([1.0, 1, 0, 0, 1, 1, 0]), count=4) == 1
    assert_refused("count: must be at least 1, got 0", share.mean, torch.ones(7), count=0)


def test_a_batch_of_other_tokens_is_refused():
    told = r"tokens: shape must be \[7\], got \[6\] \(sizes as of batch\)"
    assert_refused(told, next_tokens, TOKENS[1:], BATCH)
    assert_refused("tokens: dtype must be int64, got int32", next_tokens, TOKENS.int(), BATCH)
    assert_refused("batch: must be a SequenceBatch, got list", next_tokens, TOKENS, [3, 1, 3])
