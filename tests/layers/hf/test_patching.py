"""`dsa_layers.hf.accelerate`: the classes that it replaces or leaves, FP8 index scores, and refusals."""

import copy
import functools
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dsa_layers import SequenceBatch, load_model
from dsa_layers.hf import accelerate
from dsa_layers.layers.key_selection import SCORE_ACCUMULATORS
from tests.layers.hf.pairs import pair
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.layers.calls import record
from tests.layers.models.parity import assert_same
from tests.reference.common import assert_refused


def kinds(model):
    return {type(module).__name__ for module in model.modules()}


def with_fp8_indexer(family, directory):
    """Return (a `Pair`, the model that `load_model` makes from the pair's checkpoint). This model and `ours` compute
    index scores in FP8."""
    models = pair(family, directory, index_head_dim=128)
    own = load_model(directory, dtype=torch.float32, progress=False)
    own.precision = replace(own.precision, fp8_indexer=True)
    for module in own.modules():
        if hasattr(module, "quantize"):
            module.quantize = True
    accelerate(models.ours, fp8_indexer=True)
    return models, own


def test_attention_and_norms_are_replaced_and_nothing_else(models):
    left = ("RotaryEmbedding", "UnweightedRMSNorm", "IndexerScorer", "GroupedLinear", "Linear", "LayerNorm")
    for (name, ours), theirs in zip(models.ours.named_modules(), models.theirs.modules()):
        kind = type(theirs).__name__
        replaced = (".self_attn" in name or kind.endswith("RMSNorm")) and not kind.endswith(left)
        assert type(ours).__module__.startswith("dsa_layers.hf.") == replaced, name
        assert isinstance(ours, type(theirs)) and (replaced or type(ours) is type(theirs))
    assert_same_tensors(models.ours.state_dict(), models.theirs.state_dict())


def test_a_saved_checkpoint_is_transformers_own(models, tmp_path, tokens):
    models.ours.save_pretrained(tmp_path)
    assert "dsa_layers" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert kinds(loaded) == kinds(models.theirs)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, models.theirs(tokens).logits)


@torch.no_grad()
def test_copies_have_the_same_logits(models, tokens):
    model = accelerate(AutoModelForCausalLM.from_pretrained(models.directory))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(tokens).logits, models.ours(tokens).logits)


def test_a_second_call_changes_fp8_indexer_and_nothing_else(models, tokens):
    model = copy.deepcopy(models.ours)
    for fp8_indexer in (False, True, False):
        assert accelerate(model, fp8_indexer=fp8_indexer) is model and kinds(model) == kinds(models.ours)
        assert {module.quantize for module in model.modules() if hasattr(module, "quantize")} == {fp8_indexer}
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, models.ours(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param("deepseek_v32", marks=pytest.mark.slow), "deepseek_v4"])
def test_prompts_are_scored_with_the_same_accumulators_either_way(family, tmp_path, tokens, monkeypatch):
    models, own = with_fp8_indexer(family, tmp_path)
    asked = record(monkeypatch, "fp8_mqa_logits", seen=lambda *_, accumulators, **__: accumulators)
    other = {torch.float16: torch.float32, torch.float32: torch.float16}[SCORE_ACCUMULATORS]
    for expected in (SCORE_ACCUMULATORS, other):
        for run in (
            lambda: own(tokens[0, :30], SequenceBatch.without_cache([30])),
            lambda: models.ours(tokens[:, :30]),
        ):
            run()
            assert {*asked} == {expected}
            asked.clear()
        for module in [*own.modules(), *models.ours.modules()]:
            if hasattr(module, "accumulators"):
                module.accumulators = other


@torch.no_grad()
def test_a_model_with_hooks_of_the_accelerate_library_has_the_same_logits(models, tokens):
    """The library replaces a module's `forward`, and calls the old `forward` as `_old_forward`."""

    def hooked(module, *arguments, **options):
        return module._old_forward(*arguments, **options)

    model = copy.deepcopy(models.theirs)
    for module in model.modules():
        module._old_forward, module.forward = module.forward, functools.partial(hooked, module)
    assert_same(accelerate(model)(tokens).logits, models.theirs(tokens).logits)


def test_models_without_layers_of_these_families_are_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    assert_refused("model: must have attention layers of DeepseekV32.*got LlamaForCausalLM", accelerate, model)
    assert_refused("fp8_indexer: must be True or False, got 'yes'", accelerate, model, fp8_indexer="yes")


def test_versions_that_are_not_tested_are_refused(models, monkeypatch):
    theirs = copy.deepcopy(models.theirs)
    for version in ("5.23.1", "5.25.0", "6.0.0.dev0"):
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.raises(RuntimeError, match=rf"transformers: version {version} was not tested.*accepted: 5\.24"):
            accelerate(theirs)
    assert kinds(theirs) == kinds(models.theirs)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="import of transformers halted"):
        accelerate(theirs)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_fp8_index_scores_select_the_keys_of_our_own_model(family, tmp_path, tokens):
    models, own = with_fp8_indexer(family, tmp_path)
    expected = torch.stack([own(row, SequenceBatch.without_cache([70]), all_tokens=True) for row in tokens])
    assert_same(models.ours(tokens).logits, expected)
    assert (expected - models.theirs(tokens).logits).abs().max() > 1e-3  # FP8 scores select other keys for some tokens
    out, cache = [], None
    for part in tokens.split([40, 1, 7, *[1] * 22], dim=1):
        done = models.ours(part, cache=cache, use_cache=True)
        out, cache = [*out, done.logits], done.cache
    assert_same(torch.cat(out, 1), expected)
