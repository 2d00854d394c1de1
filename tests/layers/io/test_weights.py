"""Loading of weights: tensors are copied, cast, dequantised or cut, and refused if they do not fit the model."""

from unittest.mock import MagicMock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dsa import dequantize_per_block, per_block_cast_to_fp8
from dsa_layers.errors import CheckpointError
from dsa_layers.io import weights as weights_module
from dsa_layers.io.directory import SINGLE_NAME, Checkpoint
from dsa_layers.io.weights import load_weights
from tests.layers.io.stand_ins import BF16, F32, FP8, assert_same_tensors, failure, like, loaded, stand_in, write


@pytest.fixture
def shards():
    generator = torch.Generator().manual_seed(0)
    q, scale = per_block_cast_to_fp8(torch.randn(576, 256, generator=generator))
    first = {"embed.weight": torch.randn(6, 4, generator=generator).bfloat16(), "layer.proj.weight": q}
    second = {"layer.proj.weight_scale_inv": scale, "layer.ids": torch.arange(5), "norm.weight": torch.ones(4)}
    return first, second


@pytest.fixture
def never_read(monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments: pytest.fail("read before validation was done"))


def test_tensors_are_loaded_as_they_are(tmp_path, shards):
    write(tmp_path, *shards)
    stored = {**shards[0], **shards[1]}
    model = stand_in(like(stored), buffers={"layer.ids"})
    load_weights(model, tmp_path, progress=False)
    assert_same_tensors(model.state_dict(), stored)
    assert isinstance(model.embed.weight, torch.nn.Parameter) and not model.embed.weight.requires_grad
    assert "ids" in dict(model.layer.named_buffers()) and "ids" not in dict(model.layer.named_parameters())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ragged_blocks_are_dequantised(tmp_path, dtype):
    """The last blocks have 64 rows or 72 columns. No two scales are equal, so a shifted scale changes the result."""
    scale = torch.tensor([[2.0**i, -(2.0**i)] for i in range(5)])
    write(tmp_path, {"w": torch.full((576, 200), 2.0).to(FP8)}, {"w_scale_inv": scale})
    model = loaded({"w": ((576, 200), dtype)}, tmp_path)
    expected = 2 * scale.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :200]
    assert torch.equal(model.w, expected.to(dtype)) and model.w.dtype == dtype


def test_a_loaded_tensor_outlives_the_file(tmp_path):
    path = tmp_path / SINGLE_NAME
    save_file({"a": torch.ones(1000)}, path)
    model = loaded({"a": ((1000,), F32)}, tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as stream:  # overwrite the same inode, which the loader may have mapped
        stream.write(bytes(size))
    assert model.a.eq(1).all()


@pytest.mark.parametrize("dtype", [FP8, BF16])
def test_progress_counts_every_byte_that_is_read_once(tmp_path, shards, monkeypatch, dtype):
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
    assert options["disable"] is None  # None: tqdm shows a bar only on a terminal


def test_a_failing_read_names_the_tensor_and_leaves_the_model_on_meta(tmp_path, shards):
    write(tmp_path, *shards)
    checkpoint = Checkpoint(tmp_path)

    def opened(file, opened=checkpoint._opened):
        if file == "2.st":
            raise SafetensorError("input/output error")
        return opened(file)

    checkpoint._opened = opened
    message = failure(like({**shards[0], **shards[1]}), checkpoint)
    assert f"{tmp_path / '2.st'}: cannot read layer.proj.weight_scale_inv (F32 [5, 2]): input/output error" in message


MATRIX, MATRIX_BF16 = torch.ones(576, 256).to(FP8), {"a": ((576, 256), BF16)}
MATRIX_FP8 = {"a": ((576, 256), FP8), "a_scale_inv": ((5, 2), F32)}
SHORT_SCALE = {"a": MATRIX, "a_scale_inv": torch.ones(4, 2)}
BF16_SCALE = {"a": MATRIX, "a_scale_inv": torch.ones(5, 2).bfloat16()}
BF16_REFUSED = "a_scale_inv is BF16 [5, 2]; expected F32 or F8_E8M0 [5, 2] for the [576, 256]"
UNQUANTISED = "a is F32; expected F8_E4M3. Load a checkpoint that is not quantised"


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        ({}, {"a": ((2, 3), BF16)}, "a: missing; expected BF16 [2, 3]"),
        ({"a": torch.ones(2, 3)}, {}, "model.safetensors: unexpected a (F32 [2, 3])"),
        ({"a": torch.ones(2, 3)}, {"a": ((3, 2), F32)}, "safetensors: a has shape [2, 3]; expected [3, 2]"),
        ({"a": torch.arange(3)}, {"a": ((3,), F32)}, "a is I64; expected BF16 or F16 or F32"),
        ({"a": torch.ones(3)}, {"a": ((3,), torch.int64)}, "a is F32; expected I64"),
        ({"a": torch.ones(576, 256)}, MATRIX_FP8, UNQUANTISED),
        ({"a": torch.ones(3).to(FP8)}, {"a": ((3,), BF16)}, "a is F8_E4M3 [3]; only a matrix can be quantised"),
        ({"a": MATRIX}, MATRIX_FP8, "a is F8_E4M3 and its scale a_scale_inv is missing; expected F32 or F8_E8M0"),
        (SHORT_SCALE, MATRIX_BF16, "a_scale_inv is F32 [4, 2]; expected F32 or F8_E8M0 [5"),
        (BF16_SCALE, MATRIX_FP8, BF16_REFUSED),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tmp_path, stored, wanted, expected):
    message = failure(wanted, tmp_path, stored)
    assert message.startswith(f"{tmp_path}: 1 problem, nothing was loaded:\n")
    assert expected in message


def test_all_problems_come_at_once_and_before_reading(tmp_path, never_read):
    stored = {name: torch.ones(1) for name in ("good", *(f"extra{i}" for i in range(8)))}
    message = failure({"good": ((2,), F32)} | {f"lost{i}": ((1,), F32) for i in range(4)}, tmp_path, stored)
    lines = message.splitlines()
    assert lines[0] == f"{tmp_path}: 13 problems, nothing was loaded:"
    assert len(lines) == 12 and lines[-1].strip() == "and 3 more"
    assert "good has shape" in message and "lost3: missing" in message and "unexpected extra0" in message


def rows_of(name, shape):
    """Return {part: slices}: the row halves `.top` and `.bottom` of a weight or scale. A name with a dot is not cut."""
    if "." in name:
        return {name: ()}
    base, suffix = name.removesuffix("_scale_inv"), "_scale_inv" if name.endswith("_scale_inv") else ""
    middle = shape[0] // 2
    return {f"{base}.top{suffix}": (slice(0, middle),), f"{base}.bottom{suffix}": (slice(middle, None),)}


def test_parts_of_a_tensor_are_loaded_by_their_names_and_joined(tmp_path):
    values = torch.arange(24).view(4, 6).float()
    wanted = {"a.top": ((2, 6), F32), "a.bottom": ((2, 6), BF16)}
    model = loaded(wanted, tmp_path, {"a": values}, parts_of=rows_of)
    assert torch.equal(model.a.top, values[:2]) and torch.equal(model.a.bottom, values[2:].bfloat16())
    top, bottom = torch.ones(2, 6).bfloat16(), torch.full((2, 6), 2.0)
    model = loaded({"a": ((4, 6), F32)}, tmp_path, {"a.top": top, "a.bottom": bottom}, parts_of=rows_of)
    assert torch.equal(model.a, torch.cat((top.float(), bottom)))


@pytest.mark.parametrize("dtype", [FP8, F32])
def test_parts_of_quantised_weights_have_their_scales(tmp_path, dtype):
    q, scale = per_block_cast_to_fp8(torch.randn(512, 128, generator=torch.Generator().manual_seed(0)))
    save_file({"a": q, "a_scale_inv": scale}, tmp_path / SINGLE_NAME)
    stored, scale_rows = {"a": dequantize_per_block(q, scale)}, {"a": 256}
    if dtype == FP8:
        stored, scale_rows = {"a": q, "a_scale_inv": scale}, {"a": 256, "a_scale_inv": 2}
    expected = {}
    for name, tensor in stored.items():
        top, bottom = rows_of(name, tensor.shape)
        expected[top], expected[bottom] = tensor.split(scale_rows[name])
    assert_same_tensors(loaded(like(expected), tmp_path, parts_of=rows_of).state_dict(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_parts_that_cut_a_block_are_refused(tmp_path, dtype):
    stored = {"a": torch.ones(192, 128).to(FP8), "a_scale_inv": torch.ones(2, 1)}
    wanted = {"a.top": ((96, 128), dtype), "a.bottom": ((96, 128), dtype)}
    wanted |= {f"a.{part}_scale_inv": ((1, 1), F32) for part in ("top", "bottom") if dtype == FP8}
    message = failure(wanted, tmp_path, stored, parts_of=rows_of)
    assert "a.bottom (stored as a) is F8_E4M3 and cut at 96, inside a block of 128" in message


def test_every_problem_with_parts_comes_at_once(tmp_path, never_read):
    stored = {name: torch.ones(4, 6) for name in ("x.a", "x.b", "x.c", "y.d", "z.d")}
    wanted = dict.fromkeys(("a.top", "b.top", "d.top", "d.bottom"), ((2, 6), F32))
    wanted |= {"a.bottom": ((2, 5), F32), "b.side": ((1,), F32)}

    def parts_of(name, shape):
        if name == "c":
            raise CheckpointError("belongs to another model")
        return rows_of(name, shape)

    message = failure(wanted, tmp_path, stored, name_of=lambda name: name[2:], parts_of=parts_of)
    assert message.splitlines()[0] == f"{tmp_path}: 6 problems, nothing was loaded:"
    for problem in (
        "a.bottom (stored as x.a) has shape [2, 6]; expected [2, 5]",
        "unexpected b.bottom (stored as x.b) (F32 [2, 6])",
        "x.c: belongs to another model",
        "d.top (stored as z.d) is there twice, as y.d too",
    ):
        assert f"model.safetensors: {problem}" in message
    assert "b.side: missing; expected F32 [1]" in message
