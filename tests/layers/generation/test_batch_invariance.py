"""Generation of which a sequence's tokens depend on no other one: for which models, and what its passes are. That the
bits are the same is shown on a GPU (tests/gpu/test_generation.py), and which ways the layers take in
tests/layers/compilation/test_batch_invariant_passes.py."""

import pytest
import torch

from dsa.runtime import backends
from dsa_layers.engine.batch_invariance import batch_invariant, has_any_rows, is_batch_invariant
from dsa_layers.generation import engine_options as module
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.invariant_models import check_invariant
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.layers.linear import linear_fp32
from tests.layers.command.calls import generate
from tests.layers.generation.families import FAMILIES
from tests.layers.generation.remembering_model import RememberingModel, continued, engine_of


@pytest.fixture
def kernels(monkeypatch):
    """As if there were kernels for a CPU."""
    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_every_family(family, tiny_checkpoint, kernels):
    check_invariant(load_model(tiny_checkpoint(family), progress=False))


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"dequantize": True}, "got other weights, other indexers and torch.bfloat16"),
        ({"dtype": torch.float32}, "got FP8 weights, FP8 indexers and torch.float32"),
    ],
)
def test_models_of_another_precision(options, got, checkpoint, kernels):
    with pytest.raises(ValueError, match=f"^batch_invariant: takes a model with FP8 weights.*, {got}$"):
        Generator(load_model(checkpoint, progress=False, **options), batch_invariant=True)


def test_models_that_are_elsewhere(checkpoint, kernels):
    model = load_model(checkpoint, progress=False)
    attention = model.model.layers[1].self_attn
    attention.compile()
    told = r"^batch_invariant: takes a model that is not compiled, got model\.layers\.1\."
    with pytest.raises(ValueError, match=told):
        check_invariant(model)
    attention._compiled_call_impl = None
    attention.nope_dim = 64
    with pytest.raises(ValueError, match=r"got nope_dim=64, rope_dim=64, v_dim=128, kv_lora_rank=512 in model"):
        check_invariant(model)
    with pytest.raises(ValueError, match=r"^batch_invariant: .*, got a RememberingModel without a precision$"):
        check_invariant(RememberingModel())


def test_a_prefix_cache_is_refused(monkeypatch):
    monkeypatch.setattr(module, "check_invariant", lambda _: None)
    with pytest.raises(ValueError, match=r"^prefix_cache: must be False with batch_invariant=True, got True$"):
        Generator(RememberingModel(), batch_invariant=True, prefix_cache=True)


@pytest.mark.parametrize("drafts", [0, 2])
def test_passes(drafts, monkeypatch):
    """Of prompts one at a time, and of all sequences whose prompts are done; layers are told in the latter alone."""
    monkeypatch.setattr(module, "check_invariant", lambda _: None)
    told = []
    generator = engine_of(Generator, cache_tokens=400, max_sequences=64, draft_tokens=drafts, batch_invariant=True)
    model = generator.model
    states = RememberingModel.states

    def noted(self, *args):
        told.append((is_batch_invariant(), has_any_rows()))
        return states(self, *args)

    monkeypatch.setattr(RememberingModel, "states", noted)
    prompts = [[1], [2, 3], [i % 7 for i in range(12)], [4, 4]]
    got = generator.generate(prompts, SamplingParams(max_tokens=9))
    for prompt, completion in zip(prompts, got):
        assert completion.tokens == continued(prompt, 9)
    one = 1 + drafts
    assert model.passes[:9] == [[1], [one], [2], [one] * 2, [5], [one] * 2, [5], [one] * 2, [2]]
    assert model.passes[9:12] == [[one] * 3, [2], [one] * 4]
    assert told[:12] == [(True, False), (True, True)] * 6 and all(map(all, told[12:])) and not is_batch_invariant()


def test_what_is_left_on_errors():
    with pytest.raises(KeyError), batch_invariant("decoding"):
        with batch_invariant(None):
            assert not is_batch_invariant() and not has_any_rows()
        with batch_invariant("prompt"):
            assert is_batch_invariant() and not has_any_rows()
        assert is_batch_invariant() and has_any_rows()
        raise KeyError
    assert not is_batch_invariant() and not has_any_rows()


def test_layers_are_traced_as_ever():
    """By torch.compile, which does not know how to ask."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        compiled = torch.compile(linear_fp32, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, weight), linear_fp32(x, weight))


@pytest.mark.parametrize("options", [["--device", "cpu", "--gpus", "2"], ["--dequantize"], ["--prefix-cache"]])
def test_the_command(checkpoint, capsys, options, monkeypatch):
    monkeypatch.setattr("dsa_layers.command.generate.check_device", lambda device: torch.device(device or "cuda"))
    assert generate(checkpoint, "--batch-invariant", *options) == 2
    told = "--batch-invariant: takes a GPU and FP8 weights, without --dequantize and --prefix-cache"
    assert told in capsys.readouterr().err
