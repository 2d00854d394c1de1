"""Models that `load_model` returns: which parameters learn, and their device. Loading imports no Dynamo."""

import subprocess
import sys

import pytest
import torch

from dsa_layers import SequenceBatch, load_model
from dsa_layers.io import loading
from tests.layers.generation.families import has_drafter

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


def test_models_learn_only_if_trainable_is_given(checkpoint, tiny_checkpoint):
    model = load_model(checkpoint, dequantize=True, progress=False)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    model = load_model(tiny_checkpoint("deepseek_v32", quantized=False), trainable=True, progress=False)
    assert model.lm_head.weight.requires_grad and model.lm_head.weight.dtype == torch.bfloat16


def test_fp8_weights_do_not_learn(checkpoint):
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
