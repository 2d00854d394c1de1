"""Saved models and converted checkpoints are checkpoints that `load_model` reads."""

import json
from unittest.mock import Mock

import pytest
import torch

from dsa.reference import dequantize_fp4, quantize_fp4
from dsa_layers import convert_checkpoint, load_model, read_config, save_model
from dsa_layers.command.main import main
from dsa_layers.errors import CheckpointError
from dsa_layers.io import save as saving
from dsa_layers.io.directory import INDEX_NAME, SINGLE_NAME, Checkpoint
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import assert_same_tensors, changed, dropper, fields_of, fuse_experts, read_tensors
from tests.reference.common import assert_refused

FLOAT = {"dtype": torch.float32, "dequantize": True, "progress": False}
SMALL = 2**21  # maximum bytes per file, except for a file with one larger tensor


@pytest.fixture(scope="module")
def storage(model_type):
    return "fp4" if model_type == "deepseek_v4" else "fp8"


def described(directory):
    return {name: (info.dtype, info.shape) for name, info in Checkpoint(directory).tensors.items()}


def assert_same_model(a, b, **options):
    assert_same_tensors(*(load_model(path, **FLOAT, **options).state_dict() for path in (a, b)))


@pytest.mark.parametrize("drafter", [False, True])
def test_a_saved_model_is_as_published(directory, model_type, storage, tmp_path, drafter):
    drafter = drafter and has_drafter(model_type)
    model = load_model(directory, **FLOAT, drafter=drafter)
    save_model(model, tmp_path, like=directory, dtype=storage, shard_bytes=SMALL, progress=False)
    before, after = described(directory), described(tmp_path)
    assert after and after.items() <= before.items()
    assert_same_model(directory, tmp_path, drafter=drafter)
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    if drafter:
        assert after.keys() == before.keys() and fields_of(tmp_path) == fields_of(directory)


def test_a_saved_model_in_one_file_has_no_index(checkpoint, tmp_path):
    model = load_model(checkpoint, **FLOAT)
    save_model(model, tmp_path, like=checkpoint, dtype="bf16", progress=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {SINGLE_NAME, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert_same_model(checkpoint, tmp_path)


def test_a_refused_save_writes_nothing(checkpoint, tmp_path):
    model = load_model(checkpoint, **FLOAT)
    like, out = tmp_path / "like", tmp_path / "out"
    like.mkdir()
    for changes, problem in (
        ({"vocab_size": 17, "eos_token_id": 1, "bos_token_id": 0}, "(?s)like: .*the model: lm_head.weight has shape"),
        ({"hidden_act": "relu"}, f"{like / 'config.json'}: field 'hidden_act' is 'relu'"),
    ):
        (like / "config.json").write_text(json.dumps(fields_of(checkpoint) | changes))
        assert_refused(problem, save_model, model, out, like=like, progress=False)
    told = "dtype: must be 'bf16', 'fp8' or 'fp4', got 'int8'"
    assert_refused(told, save_model, model, out, like=checkpoint, dtype="int8")
    told = f"^directory: must hold no weights, .*, got {checkpoint} with 'model-"
    assert_refused(told, save_model, model, checkpoint, like=checkpoint, progress=False)
    assert not out.exists()


def test_bf16_and_back_changes_no_value(directory, model_type, storage, tmp_path):
    floats, again = tmp_path / "floats", tmp_path / "again"
    convert_checkpoint(directory, floats, "bf16", shard_bytes=SMALL, progress=False)
    assert {dtype for dtype, _ in described(floats).values()} <= {"BF16", "F32", "I64"}
    assert not {"quantization_config", "expert_dtype"} & fields_of(floats).keys()
    assert not load_model(floats, progress=False).precision.fp8_linear
    if not read_config(directory).use_ue8m0:
        return  # the scales are not powers of two, so BF16 weights are rounded
    assert_same_model(directory, floats, drafter=True)
    convert_checkpoint(floats, again, storage, progress=False)
    assert fields_of(again) == fields_of(directory)
    assert described(again) == described(directory)
    assert_same_model(directory, again, drafter=True)


def test_the_same_dtype_is_a_copy(directory, storage, tmp_path):
    convert_checkpoint(directory, tmp_path, storage, shard_bytes=SMALL, progress=False)
    assert fields_of(tmp_path) == fields_of(directory)
    assert_same_tensors(read_tensors(tmp_path), read_tensors(directory))


def test_conversion_to_fp4_changes_experts_alone(directory, tmp_path):
    convert_checkpoint(directory, tmp_path, "fp4", progress=False)
    assert load_model(tmp_path, progress=False).precision.fp4_experts
    before, after = (load_model(path, **FLOAT).state_dict() for path in (directory, tmp_path))
    for name, weight in before.items():
        if ".experts." in name and weight.dim() == 3:
            for own, matrix in zip(after[name], weight):
                assert torch.equal(own, dequantize_fp4(*quantize_fp4(matrix)))
        else:
            assert torch.equal(after[name], weight), name


def test_experts_from_fp4_to_fp8_keep_their_values(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("deepseek_v4")
    convert_checkpoint(directory, tmp_path, "fp8", progress=False)
    assert fields_of(tmp_path)["expert_dtype"] == "fp8"
    assert not load_model(tmp_path, progress=False).precision.fp4_experts
    assert_same_model(directory, tmp_path)


def test_experts_in_one_tensor_are_written_one_by_one(tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint("deepseek_v32", quantized=False)
    source = changed(directory, tmp_path / "fused", fuse_experts)
    convert_checkpoint(source, tmp_path / "out", "bf16", progress=False)
    assert_same_tensors(read_tensors(tmp_path / "out"), read_tensors(directory))


def test_a_checkpoint_without_multi_token_prediction_layers_is_converted(directory, tmp_path):
    last = f"model.layers.{fields_of(directory)['num_hidden_layers']}."
    source = changed(directory, tmp_path / "source", dropper("mtp.", last, "model.mtp_layers.", "model.mtp."))
    convert_checkpoint(source, tmp_path / "out", "bf16", progress=False)
    assert not fields_of(tmp_path / "out").get("num_nextn_predict_layers")
    load_model(tmp_path / "out", progress=False)


def test_scales_that_are_no_powers_of_two_are_not_rounded(tiny_checkpoint, tmp_path):
    directory, name = tiny_checkpoint("deepseek_v4"), "layers.0.attn.wq_a.scale"
    source = changed(directory, tmp_path / "source", lambda x: x.update({name: 1.5 * x[name].float()}))
    with pytest.raises(CheckpointError, match=r"wq_a\.weight_scale_inv .* is F32 .*; expected F8_E8M0"):
        convert_checkpoint(source, tmp_path / "out", "fp4", progress=False)
    convert_checkpoint(source, tmp_path / "out", "bf16", progress=False)
    assert_same_model(source, tmp_path / "out")


def test_a_conversion_into_one_file_continues_after_its_weights_are_written(checkpoint, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving.shutil, "copyfile", Mock(side_effect=KeyboardInterrupt))
        convert_checkpoint(checkpoint, tmp_path / "out", "bf16", progress=False)
    convert_checkpoint(checkpoint, tmp_path / "out", "bf16", progress=False)
    assert_same_model(checkpoint, tmp_path / "out")


def test_an_interrupted_conversion_continues(checkpoint, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    held = []

    def save(path, tensors, save=saving.save_tensors):
        held.append(sum(tensor.nbytes for tensor in tensors.values()))
        if cut in path.parents and len(held) == most:
            path.with_name(path.name + saving.PART).write_bytes(b"half")
            raise KeyboardInterrupt
        save(path, tensors)

    def convert(directory, dtype="bf16"):
        convert_checkpoint(checkpoint, directory, dtype, shard_bytes=SMALL, progress=False)

    monkeypatch.setattr(saving, "save_tensors", save)
    most = None
    convert(whole)
    largest = max(info.size for info in Checkpoint(whole).tensors.values())
    assert len(held) > 4 and max(held) <= max(SMALL, largest)  # each call gets one file's tensors
    held.clear()
    most = 3
    with pytest.raises(KeyboardInterrupt):
        convert(cut)
    done = {path: path.stat().st_mtime_ns for path in cut.glob("*.safetensors")}
    assert len(done) == 2 and not (cut / "config.json").exists()
    assert_refused("directory: must hold no weights, unless the same call was interrupted", convert, cut, "fp8")
    most = None
    convert(cut)
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
    names = [{path.name for path in out.iterdir()} for out in (whole, cut)]
    assert names[0] == names[1] and INDEX_NAME in names[0]
    assert_same_model(whole, cut)


def test_tensors_that_are_missing_unexpected_or_of_another_dtype_are_refused(checkpoint, tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["extra"] = torch.ones(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].int()

    source = changed(checkpoint, tmp_path / "source", change)
    with pytest.raises(CheckpointError) as error:
        convert_checkpoint(source, tmp_path / "out", "bf16", progress=False)
    problems = "model.norm.weight: missing", "unexpected extra (F32 [1])", "I32; expected BF16 or F16 or"
    assert all(problem in str(error.value) for problem in ("3 problems", *problems))
    assert not (tmp_path / "out").exists()


def test_conversions_that_overwrite_weights_or_split_no_blocks_are_refused(checkpoint, tiny_checkpoint, tmp_path):
    (tmp_path / "mine.safetensors").touch()
    source = changed(tiny_checkpoint("deepseek_v32", quantized=False), tmp_path / "source", hidden_size=100)
    for call, told in (
        ((checkpoint, checkpoint, "bf16"), "directory: must be another one than the checkpoint's"),
        ((checkpoint, tmp_path, "bf16"), r"directory: must hold no weights, .* with 'mine\.safetensors'"),
        ((source, tmp_path / "other", "fp8"), "in_features: must be a multiple of 128, got 100"),
    ):
        assert_refused(told, convert_checkpoint, *call, progress=False)


def test_the_command_converts(checkpoint, tmp_path, capsys):
    assert main(["convert", str(checkpoint), str(tmp_path / "out"), "--dtype", "bf16", "--shard-gb", "0.01"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'out'}: 0.")
    assert_same_model(checkpoint, tmp_path / "out")
