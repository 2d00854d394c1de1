"""Models that `load_model` returns: which parameters learn, their device, and transformers' names of tensors."""

import re
import subprocess
import sys

import pytest
import torch

from dsa_layers import SequenceBatch, load_model
from dsa_layers.errors import CheckpointError
from dsa_layers.io import loading
from dsa_layers.io.tensors import split_experts
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.models import hf_models
from tests.layers.models.parity import assert_same

NOT_LEARNED = ("gate.e_score_correction_bias", "gate.bias", "gate.tid2eid", "rotary.alpha")


def test_all_but_the_routers_biases_learn(directory, model_type):
    options = {"dtype": torch.float32, "dequantize": True, "progress": False, "drafter": has_drafter(model_type)}
    model = load_model(directory, trainable=True, **options)
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is not name.endswith(NOT_LEARNED), name
    tokens, batch = torch.arange(301), SequenceBatch.without_cache([200, 100])
    states = model.states(tokens[:-1], batch)
    results = [model(tokens[:-1], batch, all_tokens=True)]
    if model.drafter is not None:
        results.append(model.drafter.logits(model.drafter(tokens[1:], states, batch)))
    for logits in results:
        torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
    for name, parameter in model.named_parameters():
        # Selected indices have no gradient, so this loss does not train indexers.
        learns = parameter.requires_grad and ".indexer." not in name
        assert (parameter.grad is not None and bool(parameter.grad.any())) is learns, name


def test_tensors_loaded_in_inference_mode_are_no_inference_tensors(checkpoint):
    with torch.inference_mode():
        model = load_model(checkpoint, progress=False)
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) > 20 and not any(tensor.is_inference() for tensor in tensors)


def test_loading_imports_no_dynamo(directory):
    """Some ops on meta tensors, such as torch.stack, make torch import Dynamo, which takes seconds."""
    script = f"""
import sys
from dsa_layers.io.loading import load_model
load_model({str(directory)!r}, progress=False)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_models_learn_only_if_trainable_is_given_and_never_in_fp8(checkpoint, tiny_checkpoint):
    model = load_model(checkpoint, dequantize=True, progress=False)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    model = load_model(tiny_checkpoint("deepseek_v32", quantized=False), trainable=True, progress=False)
    assert model.lm_head.weight.requires_grad and model.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="trainable: FP8 weights take no gradient; accepted with dequantize=True"):
        load_model(checkpoint, trainable=True, progress=False)


def test_a_model_goes_to_the_gpu_where_there_is_one(checkpoint, monkeypatch):
    given = []
    monkeypatch.setattr(loading, "load_weights", lambda *_, device, **options: given.append(device) or 1 / 0)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with pytest.raises(ZeroDivisionError):
            load_model(checkpoint)
    assert given == [torch.device("cuda"), torch.device("cpu")]


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("down_proj", (2, 5), "experts in one tensor are [experts, hidden, inner]"),
        ("down_proj", (10**9, 1, 1), "that is 1000000000 experts; the model has 256"),
        ("gate_up_proj", (2, 7, 5), "[2, 7, 5]; experts in one tensor are [experts, 2 * inner"),
    ],
)
def test_experts_in_a_tensor_of_another_shape_are_refused(name, shape, problem):
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        split_experts(f"a.experts.{name}", shape, experts=256)


@torch.no_grad()
def test_both_spellings_of_transformers_give_the_same_model(tmp_path):
    theirs = hf_models.deepseek_v4(tmp_path / "modules", original_format=False)
    ours = load_model(tmp_path / "modules", dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1))
    assert_same(ours(tokens, SequenceBatch.without_cache([70]), all_tokens=True), theirs(tokens[None]).logits[0])
    theirs.save_pretrained(tmp_path / "mixed")
    mixed = load_model(tmp_path / "mixed", dtype=torch.float32, progress=False)
    assert_same_tensors(mixed.state_dict(), ours.state_dict())
