"""Which models batch_invariant=True accepts, and which sequences share a pass. tests/gpu compares the bits."""

import pytest
import torch

from dsa.runtime import backends
from dsa_layers import Generator, SamplingParams, load_model
from dsa_layers.engine.fp32_product import has_any_rows, is_batch_invariant
from dsa_layers.generation import engine_options
from tests.layers.command.calls import generate
from tests.layers.generation.families import FAMILIES
from tests.layers.generation.remembering_model import RememberingModel, continued, engine_of
from tests.layers.layers.calls import record


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(backends, "runs_kernel", lambda *_: True)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_gates_are_accepted(family, tiny_checkpoint, kernels):
    model = load_model(tiny_checkpoint(family), progress=False)
    if family not in ("axk2", "dots3_note", "glm5_next", "hy_v4", "hy_v4_vl", "mistral_large4"):
        engine_options.check_invariant(model)
        return
    with pytest.raises(ValueError, match="batch_invariant: takes attention without a gate"):
        engine_options.check_invariant(model)


@pytest.mark.parametrize("options", [{"dequantize": True}, {"dtype": torch.float32}])
def test_models_of_another_precision_are_refused(options, checkpoint, kernels):
    with pytest.raises(ValueError, match=r"^batch_invariant: takes a model with FP8 weights.*, got Precision\("):
        Generator(load_model(checkpoint, progress=False, **options), batch_invariant=True)


def test_models_with_other_passes_and_a_prefix_cache_are_refused(checkpoint, kernels, monkeypatch):
    model = load_model(checkpoint, progress=False)
    attention = model.model.layers[1].self_attn
    attention.compile()
    with pytest.raises(ValueError, match=r"takes a model that is not compiled, got model\.layers\.1\."):
        engine_options.check_invariant(model)
    attention._compiled_call_impl = None
    attention.nope_dim = 64
    told = r"got gate=None, nope_dim=64, rope_dim=64, v_dim=128, kv_lora_rank=512 in model"
    with pytest.raises(ValueError, match=told):
        engine_options.check_invariant(model)
    with pytest.raises(ValueError, match=r"^batch_invariant: takes a model with FP8 weights.*, got None$"):
        engine_options.check_invariant(RememberingModel())
    monkeypatch.setattr(engine_options, "check_invariant", lambda _: None)
    with pytest.raises(ValueError, match=r"^prefix_cache: must be False with batch_invariant=True, got True$"):
        Generator(RememberingModel(), batch_invariant=True, prefix_cache=True)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_pass_has_one_prompt_or_all_sequences_whose_prompts_are_done(drafts, monkeypatch):
    monkeypatch.setattr(engine_options, "check_invariant", lambda _: None)

    def flags(*_):
        return is_batch_invariant(), has_any_rows()  # (True, False) for a prompt, all True in decoding

    told = record(monkeypatch, "states", seen=flags, owner=RememberingModel)
    generator = engine_of(Generator, cache_tokens=400, max_sequences=64, draft_tokens=drafts, batch_invariant=True)
    model = generator.model
    prompts = [[1], [2, 3], [i % 7 for i in range(12)], [4, 4]]
    got = generator.generate(prompts, SamplingParams(max_tokens=9))
    for prompt, completion in zip(prompts, got):
        assert completion.tokens == continued(prompt, 9)
    one = 1 + drafts
    assert model.passes[:9] == [[1], [one], [2], [one] * 2, [5], [one] * 2, [5], [one] * 2, [2]]
    assert model.passes[9:12] == [[one] * 3, [2], [one] * 4]
    assert told[:12] == [(True, False), (True, True)] * 6 and all(map(all, told[12:])) and not is_batch_invariant()


def test_the_command_refuses_batch_invariance_on_a_cpu(checkpoint, capsys):
    assert generate(checkpoint, "--batch-invariant") == 2
    told = "--batch-invariant: takes a model on a GPU that runs the kernels, got a model on cpu"
    assert told in capsys.readouterr().err
