"""What register and accelerate replace, and what they leave."""

import copy
import functools
import importlib.util
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.hf import accelerate, patching, register, unregister
from dsa_layers.hf.paged_layer import CACHE
from dsa_layers.io.loading import load_model
from dsa_layers.layers.score_accumulators import SCORE_ACCUMULATORS, set_score_accumulators
from tests.layers.hf.pairs import MINOR, assert_same, load_model_reads_it, pair
from tests.layers.layers.calls import record
from tests.reference.common import assert_refused

needs_registering = pytest.mark.skipif(
    MINOR < patching.FIRST_WITHOUT_TORCHVISION and importlib.util.find_spec("torchvision") is None,
    reason="this version of transformers registers classes with torchvision alone",
)


@pytest.fixture
def registered():
    register()
    yield
    unregister()


def kinds(model):
    return {type(module).__name__ for module in model.modules()}


@needs_registering
@pytest.mark.usefixtures("registered")
@torch.no_grad()
def test_from_pretrained(models, tokens, tmp_path):
    """The model, and the model without its head."""
    loaded = AutoModelForCausalLM.from_pretrained(models.directory)
    assert kinds(loaded) == kinds(models.ours)
    assert_same(loaded(tokens).logits, models.theirs(tokens).logits)
    models.theirs.model.save_pretrained(tmp_path, save_original_format=False)
    body = AutoModel.from_pretrained(tmp_path)
    assert kinds(body) == kinds(models.ours.model)
    got, expected = (model(tokens).last_hidden_state for model in (body, models.theirs.model))
    assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


@needs_registering
@pytest.mark.usefixtures("registered")
def test_from_config(models):
    """New weights are drawn as transformers draws them."""
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models.directory))
    assert kinds(made) == kinds(models.ours)
    for name, parameter in made.named_parameters():
        if name.endswith(("norm.weight", "q_a_norm.weight")):
            assert (parameter == 1).all(), name
        elif parameter.dim() == 2:
            assert 0.005 < parameter.std() < 0.04 or "position_bias" in name or parameter.numel() < 64, name
    assert made(torch.arange(20)[None]).logits.isfinite().all()


def quantised(model):
    for module in model.modules():
        if hasattr(module, "quantize"):
            module.quantize = True
    return model


@needs_registering
def test_the_last_call_of_register_and_unregister_counts(models):
    def loaded():
        return kinds(AutoModelForCausalLM.from_pretrained(models.directory))

    register(fp8_indexer=True)
    quantised = loaded()
    register()
    plain = loaded()
    assert len(quantised - plain) == len(plain - quantised) == 1
    assert all(name.startswith("FP8") for name in quantised - plain)
    unregister()
    unregister()
    assert loaded() == kinds(models.theirs)


def test_every_layer_is_ours(models):
    """Attention with all that is in it, and norms; no other class is replaced, and no parameter changes."""
    left = ("RotaryEmbedding", "UnweightedRMSNorm", "IndexerScorer", "GroupedLinear", "Linear", "LayerNorm")
    for (name, ours), theirs in zip(models.ours.named_modules(), models.theirs.modules()):
        kind = type(theirs).__name__
        replaced = (".self_attn" in name or kind.endswith("RMSNorm")) and not kind.endswith(left)
        assert type(ours).__module__.startswith("dsa_layers.hf.") == replaced, name
        assert isinstance(ours, type(theirs)) and (replaced or type(ours) is type(theirs))
    ours, theirs = models.ours.state_dict(), models.theirs.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_saved_and_loaded(models, tmp_path, tokens):
    """A checkpoint of an accelerated model is transformers', and says nothing of dsa."""
    models.ours.save_pretrained(tmp_path)
    assert "dsa_layers" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert kinds(loaded) == kinds(models.theirs)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, models.theirs(tokens).logits)


@torch.no_grad()
def test_copies(models, tokens):
    model = accelerate(AutoModelForCausalLM.from_pretrained(models.directory))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(tokens).logits, models.ours(tokens).logits)


def test_accelerate_again(models, tokens):
    """It is idempotent; and the other way of scoring takes the place of the first."""
    model = copy.deepcopy(models.ours)
    assert accelerate(model) is model and kinds(model) == kinds(models.ours)
    accelerate(model, fp8_indexer=True)
    assert any(name.startswith("FP8") for name in kinds(model))
    accelerate(model)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, models.ours(tokens).logits)


@load_model_reads_it
@torch.no_grad()
@pytest.mark.parametrize("family", [pytest.param("deepseek_v32", marks=pytest.mark.slow), "deepseek_v4"])
def test_prompts_are_scored_with_the_same_accumulators_either_way(family, tmp_path, tokens, monkeypatch):
    models = pair(family, tmp_path, index_head_dim=128)
    own = quantised(load_model(tmp_path, dtype=torch.float32, progress=False))
    accelerate(models.ours, fp8_indexer=True)
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
        assert set_score_accumulators(own, other) is own
        set_score_accumulators(models.ours, other)
    assert_refused("model: must have a LightningIndexer or a", set_score_accumulators, nn.Linear(1, 1), other)
    assert_refused("accumulators: must be float32 or", set_score_accumulators, own, torch.bfloat16)


def test_a_part_of_a_model(models, tokens):
    """Layers that are accelerated one by one, as in a model of somebody's own around them."""
    model = copy.deepcopy(models.theirs)
    accelerate(model.model.layers)
    with torch.no_grad():
        assert_same(model(tokens).logits, models.theirs(tokens).logits)


@torch.no_grad()
def test_a_model_that_is_spread_over_devices(models, tokens):
    """By the `accelerate` library, whose hooks call the forward that a module had before them."""

    def hooked(module, *arguments, **options):
        return module._old_forward(*arguments, **options)

    model = copy.deepcopy(models.theirs)
    for module in model.modules():
        module._old_forward, module.forward = module.forward, functools.partial(hooked, module)
    assert_same(accelerate(model)(tokens).logits, models.theirs(tokens).logits)


def test_another_model():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    with pytest.raises(ValueError, match=r"model: must have attention layers of DeepseekV32.*got LlamaForCausalLM"):
        accelerate(model)


def test_another_version(models, monkeypatch):
    theirs = copy.deepcopy(models.theirs)
    for version in ("5.16.1", "5.25.0", "4.57.6", "6.0.0.dev0"):
        monkeypatch.setattr("transformers.__version__", version)
        for call, arguments in ((register, ()), (unregister, ()), (accelerate, (theirs,))):
            with pytest.raises(RuntimeError, match=rf"transformers: version {version} was not tested.*5\.17 to 5\.24"):
                call(*arguments)
    assert kinds(theirs) == kinds(models.theirs)


def test_an_early_version_without_torchvision(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"transformers: 5\.17 cannot make a model .* without torchvision"):
        register()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers: is not installed; pip install"):
        accelerate(nn.Linear(1, 1))


@pytest.mark.parametrize("call", [register, lambda fp8_indexer: accelerate(nn.Linear(1, 1), fp8_indexer=fp8_indexer)])
def test_wrong_options(call):
    with pytest.raises(TypeError, match="fp8_indexer: must be True or False, got 'yes'"):
        call(fp8_indexer="yes")


@load_model_reads_it
@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_fp8_index_scores(family, tmp_path, tokens):
    """The same selections, and so the same logits, as our own model has of the same checkpoint."""
    models = pair(family, tmp_path, index_head_dim=128)
    own = quantised(load_model(tmp_path, dtype=torch.float32, progress=False))
    own.precision = replace(own.precision, fp8_indexer=True)
    accelerate(models.ours, fp8_indexer=True)
    expected = torch.stack([own(row, SequenceBatch.without_cache([70]), all_tokens=True) for row in tokens])
    assert_same(models.ours(tokens).logits, expected)
    assert (expected - models.theirs(tokens).logits).abs().max() > 1e-3  # other keys are selected now and then
    out, cache = [], None
    for part in tokens.split([40, 1, 7, *[1] * 22], dim=1):
        done = models.ours(part, **{CACHE: cache}, use_cache=True)
        out, cache = [*out, done.logits], done[CACHE]
    assert_same(torch.cat(out, 1), expected)
