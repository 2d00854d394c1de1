"""A layer without an indexer reuses an earlier layer's selection, even if only one of the two reads a cache."""

import copy
from functools import partial

import pytest
import torch

from dsa_layers.batch.selected import Selected
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine.paged_attention import PagedAttention
from tests.layers.hf.pairs import Adapter, assert_close_gradients, pair
from tests.layers.layers.calls import record, use_multi_head_form
from tests.layers.models.parity import assert_same

LAYERS = range(6)
SELECTING = [0, 1, 4]  # layers 2 and 3 reuse the selection of layer 1, layer 5 that of layer 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = pair("glm_moe_dsa, shared indexers", tmp_path_factory.mktemp("model"))
    assert [i for i in LAYERS if models.ours.model.layers[i].self_attn.indexer is not None] == SELECTING
    return models


def copies(models, learns):
    """Return copies of both models. Only parameters whose names begin with `learns` require gradients; (): none."""
    found = copy.deepcopy(models.ours), copy.deepcopy(models.theirs)
    for model in found:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(learns))
    return found


def checkpoint(model, layers, use_reentrant=False):
    """Set training mode and checkpoint only `layers`."""
    model.train()
    function = partial(torch.utils.checkpoint.checkpoint, use_reentrant=use_reentrant)
    for i in layers:
        model.model.layers[i].gradient_checkpointing = True
        model.model.layers[i]._gradient_checkpointing_func = function


def assert_same_pass(ours, theirs, **arguments):
    found = [model(**arguments).logits for model in (ours, theirs)]
    assert_same(*(logits.detach() for logits in found))
    if not found[1].requires_grad:
        return
    gradients = []
    for model, logits in zip((ours, theirs), found):
        logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_close_gradients(*gradients)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("first", LAYERS)
def test_layers_with_gradients_read_what_frozen_layers_selected(models, tokens, first, batch_size, use_cache):
    ours, theirs = copies(models, f"model.layers.{first}.")
    assert_same_pass(ours, theirs, input_ids=tokens[:batch_size, :48], use_cache=use_cache)


@pytest.mark.parametrize("place", ["1.self_attn.indexer.wq_b", "2.self_attn.kv_b_proj", "3.self_attn.q_b_proj"])
def test_a_mix_of_layers_with_adapters_and_without(models, tokens, place):
    ours, theirs = copies(models, ())
    path, _, name = f"model.layers.{place}".rpartition(".")
    torch.manual_seed(0)
    adapter = Adapter(getattr(theirs.get_submodule(path), name))
    for model in (ours, theirs):
        setattr(model.get_submodule(path), name, copy.deepcopy(adapter))
    assert_same_pass(ours, theirs, input_ids=tokens[:, :48], use_cache=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("checkpointed", [[1], [2], [3, 5], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("first", [0, 2, 5])
def test_a_mix_of_layers_with_checkpointing_and_without(models, tokens, first, checkpointed, use_reentrant):
    ours, theirs = copies(models, f"model.layers.{first}.")
    for model in (ours, theirs):
        checkpoint(model, checkpointed, use_reentrant)
    # A reentrant checkpoint computes gradients of its layer only if the layer's input requires a gradient.
    if use_reentrant and first in checkpointed:
        for model in (ours, theirs):
            model.model.embed_tokens.requires_grad_(True)
    assert_same_pass(ours, theirs, input_ids=tokens[:, :48], use_cache=True)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa, shared indexers", "deepseek_v4"])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_all_layers_of_a_pass_see_the_same_sequences(kind, checkpointed, tokens, tmp_path):
    """Positions begin again after 12 tokens. If layer 0 is checkpointed, it has no cache and sees two sequences, which
    the other layers' caches refuse. V4 refuses them with a cache, too."""
    model = pair(kind, tmp_path).ours.requires_grad_(False)
    positions = torch.cat([torch.arange(12), torch.arange(9)])[None]
    arguments = {"position_ids": positions, "use_cache": True}
    together = None if kind == "deepseek_v4" else model(tokens[:2, :21], **arguments).logits
    checkpoint(model, [checkpointed])
    if kind == "deepseek_v4" or checkpointed == 0:
        with pytest.raises(ValueError, match=r"position_ids: must be consecutive .* need use_cache=False"):
            model(tokens[:2, :21], **arguments)
    else:
        assert_same(model(tokens[:2, :21], **arguments).logits, together)


@pytest.fixture
def multi_head(monkeypatch):
    """Make prefills without gradients use the multi-head form on a CPU. Return the growing list of their layers."""
    use_multi_head_form(monkeypatch)
    return record(monkeypatch, "_multi_head", seen=lambda self, *_, **__: self, owner=PagedAttention)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("first", LAYERS)
def test_the_multi_head_form_is_not_for_layers_with_gradients(models, tokens, first, use_cache, multi_head):
    ours, theirs = copies(models, f"model.layers.{first}.")
    assert_same_pass(ours, theirs, input_ids=tokens[:, :48], use_cache=use_cache)
    assert [layer.layer_idx for layer in multi_head] == list(range(first))


def test_a_reentrant_checkpoint_selects_without_gradients(models, tokens, multi_head):
    """In the backward pass, layers run again, and those without an indexer read the selection of the first run."""
    ours, theirs = copies(models, "")
    for model in (ours, theirs):
        checkpoint(model, LAYERS, use_reentrant=True)
    assert_same_pass(ours, theirs, input_ids=tokens[:, :48])


@pytest.mark.slow
def test_a_mix_in_compiled_layers(models, tokens):
    ours, theirs = copies(models, "model.layers.2.")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    expected = theirs(tokens[:, :48]).logits.detach()
    assert_same(compiled(tokens[:, :48], use_cache=True).logits.detach(), expected)


PAGES = [[0, 3, 7, 1], [2], [4, 5, 6]]
PAGED = SequenceBatch.paged([30, 5, 3], [50, 9, 33], PAGES, 16)
OTHER_PAGES = SequenceBatch.paged([30, 5, 3], [50, 9, 33], [[8, 2, 4, 0], [5], [7, 1, 3]], 16)
FORMS = ["positions", "rows", "slots"]


@pytest.mark.parametrize("counted_in", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_indices_name_the_same_keys_in_positions_rows_and_slots(counted_in, other):
    positions = torch.arange(0, 40, 3, dtype=torch.int32).expand(38, -1)
    positions = torch.where(positions < PAGED.visible_keys[:, None], positions, -1)
    expected = {"positions": positions, "slots": PAGED.slots_of(positions)}
    expected["rows"] = torch.where(positions < 0, -1, positions + PAGED.key_starts[:, None])
    there = Selected(positions, PAGED, "positions").indices(other, OTHER_PAGES)
    found = Selected(there, OTHER_PAGES, other).indices(counted_in, PAGED)
    assert found.dtype == torch.int32 and torch.equal(found, expected[counted_in])
