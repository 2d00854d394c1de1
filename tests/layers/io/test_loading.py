"""Models loaded to be trained: which parameters learn, what a step makes of them, and how they are written."""

import json
import subprocess
import sys

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io import loading
from dsa_layers.io.directory import INDEX_NAME, Checkpoint
from dsa_layers.io.export import save_fp8_checkpoint
from dsa_layers.io.loading import load_model
from dsa_layers.io.published_format import as_published
from tests.layers.generation.families import FAMILIES

NOT_LEARNED = ("gate.e_score_correction_bias", "gate.bias", "gate.tid2eid")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tiny_checkpoint):
    return tiny_checkpoint(request.param)


def trainable(directory):
    return load_model(directory, dtype=torch.float32, dequantize=True, trainable=True, progress=False)


def test_all_but_the_routers_biases_learn(directory):
    model = trainable(directory)
    assert model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is not name.endswith(NOT_LEARNED), name
    tokens = torch.arange(300)
    logits = model(tokens, SequenceBatch.without_cache([200, 100]), all_tokens=True)
    torch.nn.functional.cross_entropy(logits, tokens).backward()
    for name, parameter in model.named_parameters():
        # What an indexer selects has no gradient: a loss of its own trains it.
        learns = parameter.requires_grad and ".indexer." not in name
        assert (parameter.grad is not None and bool(parameter.grad.any())) is learns, name


LOAD = """
import sys, torch
from dsa_layers.io.loading import load_model
assert "torch._dynamo" not in sys.modules, "torch imports it by itself"
model = load_model(sys.argv[1], progress=False)
assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
assert "torch._dynamo" not in sys.modules, "loading has imported it"
"""


def test_in_inference_mode(checkpoint):
    with torch.inference_mode():
        model = load_model(checkpoint, progress=False)
        assert torch.is_inference_mode_enabled()
    tensors = [*model.parameters(), *model.buffers()]
    assert len(tensors) > 20 and not any(tensor.is_inference() for tensor in tensors)


def test_loading_imports_no_dynamo(directory):
    """It takes two seconds, and torch asks for it wherever a tensor without memory is computed."""
    done = subprocess.run([sys.executable, "-c", LOAD, directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_is_not_quantised(tiny_checkpoint):
    model = load_model(tiny_checkpoint("deepseek_v32", quantized=False), trainable=True, progress=False)
    assert model.lm_head.weight.requires_grad and model.lm_head.weight.dtype == torch.bfloat16


def test_nothing_learns_unless_asked(checkpoint):
    model = load_model(checkpoint, dequantize=True, progress=False)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())


def test_fp8_weights_do_not_learn(checkpoint):
    with pytest.raises(ValueError, match="trainable: FP8 weights take no gradient; accepted with dequantize=True"):
        load_model(checkpoint, trainable=True, progress=False)
    with pytest.raises(TypeError, match="trainable: must be True or False, got 1"):
        load_model(checkpoint, trainable=1)


@pytest.mark.parametrize("drafter", [False, True])
def test_export_in_the_published_format(directory, tmp_path, drafter):
    """What was quantised before is so again, without loss: FP8 blocks, and DeepSeek-V4's experts in FP4."""
    options = {"dtype": torch.float32, "dequantize": True, "drafter": drafter, "progress": False}
    model = load_model(directory, **options)
    fields = json.loads((directory / "config.json").read_text())
    if not drafter:
        fields["num_nextn_predict_layers"] = 0
        if "compress_ratios" in fields:  # those of the multi-token-prediction layers are at the end
            fields["compress_ratios"] = fields["compress_ratios"][: fields["num_hidden_layers"]]
    save_fp8_checkpoint(model, tmp_path, fields)
    before, after = (
        {name: (info.dtype, info.shape) for name, info in Checkpoint(path).tensors.items()}
        for path in (directory, tmp_path)
    )
    assert after and after.items() <= before.items()
    assert after.keys() == before.keys() or not drafter
    again = load_model(tmp_path, **options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_refused_export_writes_nothing(checkpoint, tmp_path):
    model = load_model(checkpoint, dequantize=True, progress=False)
    fields = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text("before")
    for wrong, problem in (
        ({"quantization_config": None}, "fields: must have a quantization_config"),
        ({"vocab_size": 17, "eos_token_id": 1, "bos_token_id": 0}, "fields: .* has shape"),
        ({"hidden_act": "relu"}, f"{tmp_path / 'config.json'}: field 'hidden_act' is 'relu'"),
    ):
        with pytest.raises(ValueError, match=f"^{problem}"):
            save_fp8_checkpoint(model, tmp_path, fields | wrong)
    with pytest.raises(ValueError, match=r"^fields: must take at most 1048576 bytes as JSON, got \d+$"):
        save_fp8_checkpoint(model, tmp_path, fields | {"architectures": ["x" * 2**20]})
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": "end"}')
    with pytest.raises(ValueError, match=f"^{generation}: field 'eos_token_id'"):
        save_fp8_checkpoint(model, tmp_path, fields)
    generation.unlink()
    (tmp_path / INDEX_NAME).touch()
    with pytest.raises(ValueError, match=f"^directory: must hold no {INDEX_NAME}, got {tmp_path}$"):
        save_fp8_checkpoint(model, tmp_path, fields)
    assert (tmp_path / "config.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", INDEX_NAME}


def test_dtypes_that_are_not_written():
    manifest = {"a": ((2,), "F64")}
    with pytest.raises(ValueError, match="manifest: a is F64; tensors that can be written are BF16, F32, I64"):
        as_published("a", torch.zeros(2), manifest, {}, use_ue8m0=True)


def test_a_model_goes_to_the_gpu_where_there_is_one(checkpoint, monkeypatch):
    given = []
    monkeypatch.setattr(loading, "load_weights", lambda *_, device, **options: given.append(device) or 1 / 0)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with pytest.raises(ZeroDivisionError):
            load_model(checkpoint)
    assert given == [torch.device("cuda"), torch.device("cpu")]
