"""Weights of a checkpoint in a model: as they are, cast and dequantised, and tensors that do not fit."""

from unittest.mock import MagicMock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dsa_layers.errors import CheckpointError
from dsa_layers.io import directory as directory_module
from dsa_layers.io import weights as weights_module
from dsa_layers.io.directory import SINGLE_NAME, Checkpoint
from dsa_layers.io.weights import load_weights
from tests.layers.io.stand_ins import BF16, F32, FP8, failure, like, stand_in, write


def test_loads_tensors_as_they_are(tmp_path, shards):
    write(tmp_path, *shards)
    stored = {**shards[0], **shards[1]}
    model = stand_in(like(stored), buffers={"layer.ids"})
    load_weights(model, tmp_path, progress=False)
    state = model.state_dict()
    assert state.keys() == stored.keys()
    for name, tensor in stored.items():
        assert state[name].dtype == tensor.dtype and state[name].device.type == "cpu"
        assert torch.equal(state[name].float(), tensor.float()), name
    assert isinstance(model.embed.weight, torch.nn.Parameter) and not model.embed.weight.requires_grad
    assert "ids" in dict(model.layer.named_buffers()) and "ids" not in dict(model.layer.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_floats(tmp_path, dtype):
    values = torch.tensor([1.0, 2.5, -3.25])
    save_file({"a": values, "b": values.half(), "c": values.bfloat16()}, tmp_path / SINGLE_NAME)
    model = stand_in(dict.fromkeys("abc", ((3,), dtype)))
    load_weights(model, tmp_path, progress=False)
    for name in "abc":
        assert torch.equal(model.state_dict()[name], values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantises_ragged_blocks(tmp_path, dtype):
    """576 rows have 5 rows of scales: the last block has 64 rows. Scales far apart, so that a shifted one shows."""
    q = torch.full((576, 200), 2.0).to(FP8)
    scale = torch.tensor([[2.0**i, -(2.0**i)] for i in range(5)])
    write(tmp_path, {"w": q}, {"w_scale_inv": scale})
    model = stand_in({"w": ((576, 200), dtype)})
    load_weights(model, tmp_path, progress=False)
    for row in (0, 127, 128, 511, 512, 575):
        assert model.w[row, :128].eq(2 * 2.0 ** (row // 128)).all()
        assert model.w[row, 128:].eq(-2 * 2.0 ** (row // 128)).all()
    assert model.w.dtype == dtype


def test_a_tensor_that_cannot_be_read_is_named(tmp_path):
    save_file({"weight": torch.ones(2, 2)}, tmp_path / SINGLE_NAME)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no tensor bias"):
        checkpoint.read("bias")
    (tmp_path / SINGLE_NAME).unlink()
    with pytest.raises(CheckpointError, match="cannot read weight"):
        checkpoint.read("weight")


def test_copy_outlives_the_file(tmp_path):
    path = tmp_path / SINGLE_NAME
    save_file({"a": torch.ones(1000)}, path)
    model = stand_in({"a": ((1000,), torch.float32)})
    load_weights(model, tmp_path, progress=False)
    size = path.stat().st_size
    with path.open("r+b") as stream:  # in place: the same inode
        stream.write(bytes(size))
    assert model.a.eq(1).all()


def test_skip_ignores_and_reads_nothing(tmp_path, shards, monkeypatch):
    write(tmp_path, *shards)
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name, *options: read.append(name) or original(self, name, *options)
    )
    model = stand_in({"norm.weight": ((4,), torch.float32)})
    load_weights(model, tmp_path, skip=lambda name: name.startswith(("embed.", "layer.")), progress=False)
    assert read == ["norm.weight"]
    message = failure(stand_in(like(shards[1])), tmp_path, skip=lambda name: "norm" in name or "embed" in name)
    assert "norm.weight: missing; the model expects F32 [4]" in message


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_progress_counts_every_byte_once(tmp_path, shards, monkeypatch, dtype):
    write(tmp_path, *shards, {"mtp": torch.ones(100)})
    stored = {**shards[0], **shards[1]}
    tqdm = MagicMock()
    monkeypatch.setattr(weights_module, "tqdm", tqdm)
    tensors = {**like(stored), "layer.proj.weight": ((576, 256), dtype)}
    if dtype != FP8:
        del tensors["layer.proj.weight_scale_inv"]
    load_weights(stand_in(tensors), tmp_path, skip=lambda name: name == "mtp")
    options = tqdm.call_args.kwargs
    updates = tqdm.return_value.__enter__.return_value.update.call_args_list
    assert sum(call.args[0] for call in updates) == options["total"] == sum(tensor.nbytes for tensor in stored.values())
    assert (options["unit"], options["unit_scale"], options["disable"]) == ("B", True, None)  # off but on a terminal


def test_every_file_is_opened_once(tmp_path, monkeypatch):
    """Also files of scales, though weights and scales are read in turn: each opening parses the whole header."""
    opened, original = [], directory_module.safe_open
    monkeypatch.setattr(
        directory_module, "safe_open", lambda path, **options: opened.append(path.name) or original(path, **options)
    )
    names = [f"{i}.weight" for i in "zya"]
    weights = {name: torch.ones(128, 128).to(FP8) for name in names}
    floats = ({f"{file}.{leaf}": torch.ones(2) for leaf in "zya"} for file in range(2))
    write(tmp_path, weights, {f"{name}_scale_inv": torch.ones(1, 1) for name in names}, *floats)
    wanted = dict.fromkeys(names, ((128, 128), F32)) | {f"{i}.{leaf}": ((2,), F32) for leaf in "azy" for i in (1, 0)}
    load_weights(stand_in(wanted), tmp_path, progress=False)
    assert opened == ["1.st", "2.st", "3.st", "4.st"]


def test_failing_read_leaves_the_model_on_meta(tmp_path, shards, monkeypatch):
    write(tmp_path, *shards)

    class Failing:
        def __init__(self, path, framework):
            self.path = path

        def get_tensor(self, name):
            if name == "layer.ids":
                raise SafetensorError("input/output error")
            return load_file(self.path)[name]

    monkeypatch.setattr(directory_module, "safe_open", Failing)
    message = failure(stand_in(like({**shards[0], **shards[1]})), tmp_path)
    assert f"{tmp_path / '2.st'}: cannot read layer.ids (I64 [5]): input/output error" in message


# What a header can say that does not fit the model.


MATRIX, MATRIX_BF16 = torch.ones(576, 256).to(FP8), {"a": ((576, 256), BF16)}
MATRIX_FP8 = {"a": ((576, 256), FP8), "a_scale_inv": ((5, 2), F32)}
BF16_SCALE = {"a": MATRIX, "a_scale_inv": torch.ones(5, 2).bfloat16()}


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({}, {"a": ((2, 3), BF16)}, "a: missing; the model expects BF16 [2, 3]"),
        ({"a": torch.ones(2, 3)}, {}, "model.safetensors: unexpected a (F32 [2, 3])"),
        ({"a": torch.ones(2, 3)}, {"a": ((3, 2), F32)}, "safetensors: a has shape [2, 3]; the model expects [3, 2]"),
        ({"a": torch.arange(3)}, {"a": ((3,), F32)}, "a is I64; the model's torch.float32 accepts BF16, F16, F32"),
        ({"a": torch.arange(3)}, {"a": ((3,), torch.int32)}, "a is I64; the model's torch.int32 accepts I32"),
        ({"a": torch.ones(3)}, {"a": ((3,), torch.int64)}, "a is F32; the model's torch.int64 accepts I64"),
        ({"a": torch.ones(3)}, {"a": ((3,), FP8)}, "a is F32; the model expects F8_E4M3. For a checkpoint that is not"),
        ({"a": torch.ones(3)}, {"a": ((3,), FP8)}, "quantised, build the model in the dequantised mode"),
        # dequantised: the scale is part of the weight
        ({"a": MATRIX}, MATRIX_BF16, "a is F8_E4M3 and its scale a_scale_inv is missing; expected F32 or"),
        (
            {"a": MATRIX, "a_scale_inv": torch.ones(4, 2)},
            MATRIX_BF16,
            "a_scale_inv is F32 [4, 2]; expected F32 or F8_E8M0 [5,",
        ),
        (BF16_SCALE, MATRIX_BF16, "a_scale_inv is BF16 [5, 2]; expected F32 or F8_E8M0 [5, 2] for the [576, 256]"),
        ({"a": torch.ones(3).to(FP8)}, {"a": ((3,), BF16)}, "a is F8_E4M3 [3]; only a matrix can be dequantised"),
        # kept in FP8: the scale is a tensor of the model
        ({"a": MATRIX}, MATRIX_FP8, "a_scale_inv: missing; the model expects F32 [5, 2]"),
        ({"a": MATRIX, "a_scale_inv": torch.ones(4, 2)}, MATRIX_FP8, "has shape [4, 2]; the model expects [5, 2]"),
        (BF16_SCALE, MATRIX_FP8, "a_scale_inv is BF16; the model's torch.float32 accepts F32, F8_E8M0"),
    ],
)
def test_mismatch(tmp_path, stored, wanted, expected):
    save_file(stored, tmp_path / SINGLE_NAME)
    message = failure(stand_in(wanted), tmp_path)
    assert message.startswith(f"{tmp_path}: 1 problem, nothing was loaded:\n")
    assert expected in message


def test_all_problems_come_at_once_and_before_reading(tmp_path, monkeypatch):
    save_file({f"extra{i}": torch.ones(1) for i in range(8)} | {"good": torch.ones(1)}, tmp_path / SINGLE_NAME)
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments: pytest.fail("read before validation was done"))
    wanted = {"good": ((2,), torch.float32)} | {f"lost{i}": ((1,), torch.float32) for i in range(4)}
    message = failure(stand_in(wanted), tmp_path)
    lines = message.splitlines()
    assert lines[0] == f"{tmp_path}: 13 problems, nothing was loaded:"
    assert len(lines) == 12 and lines[-1].strip() == "and 3 more"
    assert "good has shape" in message and "lost3: missing" in message and "unexpected extra0" in message


@pytest.mark.slow
def test_many_tensors(tmp_path):
    """A quarter of the published number of tensors; anything quadratic in it would take minutes."""
    names = [f"layers.{layer}.experts.{expert}.w{i}" for layer in range(30) for expert in range(256) for i in range(3)]
    data = torch.arange(len(names), dtype=torch.float32).view(-1, 1)
    quarter = len(names) // 4
    write(tmp_path, *({n: data[i] for i, n in enumerate(names) if i // quarter == shard} for shard in range(4)))
    model = stand_in(dict.fromkeys(names, ((1,), torch.float32)))
    load_weights(model, tmp_path, progress=False)
    assert model.state_dict()["layers.29.experts.255.w2"].item() == len(names) - 1
