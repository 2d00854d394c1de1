import json
import os
import re
from unittest.mock import MagicMock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dsa import dequantize_per_block, per_block_cast_to_fp8
from dsa_layers.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, CheckpointError, load_weights
from dsa_layers.checkpoint import directory as directory_module
from dsa_layers.checkpoint import weights as weights_module
from dsa_layers.checkpoint.fp4 import dequantize_fp4, widen_fp4
from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.tiny import write_tiny_checkpoint

FP8 = torch.float8_e4m3fn


def stand_in(tensors, buffers=()):
    """A module tree on the meta device with a tensor of the given (shape, dtype) under each name."""
    root = torch.nn.Module()
    modules = {"": root}
    for name, (shape, dtype) in tensors.items():
        *path, leaf = name.split(".")
        for depth in range(len(path)):
            here = ".".join(path[: depth + 1])
            if here not in modules:
                modules[here] = torch.nn.Module()
                modules[".".join(path[:depth])].add_module(path[depth], modules[here])
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        owner = modules[".".join(path)]
        if name in buffers:
            owner.register_buffer(leaf, tensor)
        else:
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def like(tensors):
    """The (shape, dtype) of each tensor, for `stand_in`."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def write(directory, *shards, index=None):
    """Writes the shards as 1.st, 2.st, ... and their index, or the given one."""
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        save_file(tensors, directory / f"{number}.st")
        weight_map.update(dict.fromkeys(tensors, f"{number}.st"))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map} if index is None else index
    (directory / INDEX_NAME).write_text(index if isinstance(index, str) else json.dumps(index))


def all_meta(model):
    return all(tensor.is_meta for tensor in model.state_dict().values())


def failure(model, directory, **options):
    """The message with which a load fails, having left the model as it was."""
    with pytest.raises(CheckpointError) as error:
        load_weights(model, directory, progress=False, **options)
    assert all_meta(model)
    return str(error.value)


@pytest.fixture
def shards():
    generator = torch.Generator().manual_seed(0)
    q, scale = per_block_cast_to_fp8(torch.randn(576, 256, generator=generator))
    first = {"embed.weight": torch.randn(6, 4, generator=generator).bfloat16(), "layer.proj.weight": q}
    second = {"layer.proj.weight_scale_inv": scale, "layer.ids": torch.arange(5), "norm.weight": torch.ones(4)}
    return first, second


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory


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


def test_single_file(tmp_path, shards):
    save_file(shards[0], tmp_path / SINGLE_NAME)
    model = stand_in(like(shards[0]))
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.embed.weight, shards[0]["embed.weight"])


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
    assert (options["unit"], options["unit_scale"], options["disable"]) == ("B", True, False)


def test_reads_file_by_file(tmp_path, monkeypatch):
    names = [f"{layer}.{leaf}" for layer in range(3) for leaf in "zya"]
    write(tmp_path, *({name: torch.ones(2) for name in names if name.startswith(str(layer))} for layer in range(3)))
    opened = []
    original = directory_module.safe_open
    monkeypatch.setattr(
        directory_module, "safe_open", lambda path, **options: opened.append(path.name) or original(path, **options)
    )
    load_weights(stand_in(dict.fromkeys(reversed(names), ((2,), torch.float32))), tmp_path, progress=False)
    assert opened == ["1.st", "2.st", "3.st"]


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


def test_checkpoint_reads_by_name(tmp_path, shards):
    write(tmp_path, *shards)
    checkpoint = Checkpoint(tmp_path)
    info = checkpoint.tensors["layer.proj.weight"]
    assert (info.file, info.dtype, info.shape, info.size) == ("1.st", "F8_E4M3", (576, 256), 576 * 256)
    assert torch.equal(checkpoint.read("layer.ids"), torch.arange(5))
    with pytest.raises(CheckpointError, match="holds no tensor nope"):
        checkpoint.read("nope")


# What a header can say that does not fit the model.


BF16, F32 = torch.bfloat16, torch.float32
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


# Scales of other dtypes, and packed FP4.


E8M0 = torch.float8_e8m0fnu


def powers(exponents):
    return (exponents + 127).to(torch.uint8).view(E8M0)


@pytest.fixture
def fp4():
    """A packed [200, 64] weight (values [200, 128]) and its scales."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (200, 64), dtype=torch.int8, generator=generator)
    return {"w.weight": packed, "w.weight_scale_inv": powers(torch.randint(-9, 6, (200, 4), generator=generator))}


@pytest.mark.parametrize("dtype", [E8M0, torch.float32])
def test_fp8_scales_of_either_dtype(tmp_path, dtype):
    exponents = torch.arange(10).view(5, 2) - 127
    q = torch.full((576, 200), 2.0).to(FP8)
    save_file({"w.weight": q, "w.weight_scale_inv": powers(exponents).to(dtype)}, tmp_path / SINGLE_NAME)
    expected = torch.ldexp(torch.ones(5, 2), exponents)
    model = stand_in({"w.weight": ((576, 200), FP8), "w.weight_scale_inv": ((5, 2), F32)})
    load_weights(model, tmp_path, progress=False)
    assert model.w.weight_scale_inv.dtype == F32 and torch.equal(model.w.weight_scale_inv, expected)
    model = stand_in({"w.weight": ((576, 200), F32)})
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.w.weight[::128, ::128], 2 * expected)


@pytest.mark.parametrize("name", ["w.weight", "weights"])
def test_fp4_is_widened_to_fp8(tmp_path, fp4, name):
    """Whatever lies first in the file, the weight or its scale."""
    stored = {name: fp4["w.weight"], f"{name}_scale_inv": fp4["w.weight_scale_inv"]}
    save_file(stored, tmp_path / SINGLE_NAME)
    model = stand_in({name: ((200, 128), FP8), f"{name}_scale_inv": ((2, 1), F32)})
    load_weights(model, tmp_path, progress=False)
    q, scale = widen_fp4(*fp4.values())
    state = model.state_dict()
    assert torch.equal(state[name].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(state[f"{name}_scale_inv"], scale)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_fp4_is_dequantised(tmp_path, fp4, dtype):
    write(tmp_path, {"w.weight": fp4["w.weight"]}, {"w.weight_scale_inv": fp4["w.weight_scale_inv"]})
    model = stand_in({"w.weight": ((200, 128), dtype)})
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.w.weight, dequantize_fp4(*fp4.values(), dtype))


def test_fp4_by_its_own_name(tmp_path, fp4):
    """safetensors calls packed e2m1 F4, and counts values."""
    packed = fp4["w.weight"].view(torch.float4_e2m1fn_x2)
    save_file({"w.weight": packed, "w.weight_scale_inv": fp4["w.weight_scale_inv"]}, tmp_path / SINGLE_NAME)
    info = Checkpoint(tmp_path).tensors["w.weight"]
    assert (info.dtype, info.shape, info.size) == ("F4", (200, 128), 200 * 64)
    model = stand_in({"w.weight": ((200, 128), F32)})
    load_weights(model, tmp_path, progress=False)
    assert torch.equal(model.w.weight, dequantize_fp4(*fp4.values()))


def test_int8_is_not_fp4_where_the_model_wants_int8(tmp_path):
    save_file({"a": torch.ones(4, 4, dtype=torch.int8)}, tmp_path / SINGLE_NAME)
    model = stand_in({"a": ((4, 4), torch.int8)})
    load_weights(model, tmp_path, progress=False)
    assert model.a.eq(1).all()


def test_fp4_that_fp8_cannot_hold(tmp_path, fp4):
    """Found when it is read; the dequantised mode loads it."""
    fp4["w.weight"][130, :16], fp4["w.weight"][131, :16] = 0x11, 0x77
    scale = fp4["w.weight_scale_inv"].view(torch.uint8)
    scale[130, 0], scale[131, 0] = 100, 127 + 6
    save_file(fp4, tmp_path / SINGLE_NAME)
    model = stand_in({"w.weight": ((200, 128), FP8), "w.weight_scale_inv": ((2, 1), F32)})
    message = failure(model, tmp_path)
    expected = "w.weight: block [1, 0] of 128 x 128: its groups' scales go from 2^-27 to 2^6, a spread of 2^33"
    assert message.startswith(f"{tmp_path / SINGLE_NAME}: {expected}")
    model = stand_in({"w.weight": ((200, 128), F32)})
    load_weights(model, tmp_path, progress=False)
    assert model.w.weight[130, 0] == 2.0**-28


def dropped(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize("dtype", [FP8, F32])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (dropped("w.weight_scale_inv"), "w.weight is I8 and its scale w.weight_scale_inv is missing; expected F8_E8M0"),
        (
            lambda tensors: tensors.update({"w.weight_scale_inv": torch.ones(200, 4)}),
            "w.weight_scale_inv is F32 [200, 4]; expected F8_E8M0 [200, 4] for the [200, 64] weight",
        ),
        (
            lambda tensors: tensors.update({"w.weight_scale_inv": powers(torch.zeros(2, 1))}),
            "w.weight_scale_inv is F8_E8M0 [2, 1]; expected F8_E8M0 [200, 4] for the [200, 64] weight",
        ),
        (
            lambda tensors: tensors.update({"w.weight": torch.zeros(200, 32, dtype=torch.int8)}),
            "w.weight has shape [200, 32], FP4 values of [200, 64]; the model expects [200, 128]",
        ),
        (
            lambda tensors: tensors.update({"w.weight": torch.zeros(128, dtype=torch.int8)}),
            "w.weight has shape [128]; the model expects [200, 128]",
        ),
    ],
)
def test_fp4_that_does_not_fit(tmp_path, fp4, dtype, damage, expected, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments: pytest.fail("read before validation was done"))
    damage(fp4)
    save_file(fp4, tmp_path / SINGLE_NAME)
    wanted = {"w.weight": ((200, 128), dtype)}
    if dtype == FP8:
        wanted["w.weight_scale_inv"] = ((2, 1), F32)
    assert expected in failure(stand_in(wanted), tmp_path)


def test_fp4_of_half_a_group(tmp_path):
    stored = {"a": torch.zeros(4, 24, dtype=torch.int8), "a_scale_inv": powers(torch.zeros(4, 2))}
    save_file(stored, tmp_path / SINGLE_NAME)
    message = failure(stand_in({"a": ((4, 48), BF16)}), tmp_path)
    assert "a is I8 [4, 24]; FP4 has groups of 32 columns, got 48 columns" in message


# A tensor that holds several of the model's.


def rows_of(name, shape):
    """Each half of the rows is a tensor of its own, and such a half is whole."""
    if "." in name:
        return {name: ()}
    middle = shape[0] // 2
    return {f"{name}.top": (slice(0, middle),), f"{name}.bottom": (slice(middle, None),)}


def test_slices(tmp_path, monkeypatch):
    values = torch.arange(24).view(4, 6).float()
    save_file({"a": values}, tmp_path / SINGLE_NAME)
    tqdm = MagicMock()
    monkeypatch.setattr(weights_module, "tqdm", tqdm)
    model = stand_in({"a.top": ((2, 6), F32), "a.bottom": ((2, 6), BF16)})
    load_weights(model, tmp_path, parts_of=rows_of)
    assert torch.equal(model.a.top, values[:2]) and torch.equal(model.a.bottom, values[2:].bfloat16())
    updates = tqdm.return_value.__enter__.return_value.update.call_args_list
    assert [call.args[0] for call in updates] == [48, 48] and tqdm.call_args.kwargs["total"] == 96


def test_a_tensor_made_of_several(tmp_path):
    """The model's is cut as the checkpoint's are; each part is cast on its own, and none may be missing."""
    top, bottom = torch.ones(2, 6).bfloat16(), torch.full((2, 6), 2.0)
    save_file({"a.top": top, "a.bottom": bottom}, tmp_path / SINGLE_NAME)
    model = stand_in({"a": ((4, 6), F32)})
    load_weights(model, tmp_path, parts_of=rows_of, progress=False)
    assert torch.equal(model.a, torch.cat((top.float(), bottom)))
    save_file({"a.bottom": bottom, "a.side": top}, tmp_path / SINGLE_NAME)
    message = failure(stand_in({"a": ((4, 6), F32)}), tmp_path, parts_of=rows_of)
    assert "a.top: missing; the model expects F32 [2, 6]" in message and "unexpected a.side" in message


@pytest.mark.parametrize("kept", [True, False])
def test_slices_of_quantised_weights(tmp_path, kept):
    q, scale = per_block_cast_to_fp8(torch.randn(512, 128, generator=torch.Generator().manual_seed(0)))
    save_file({"a": q, "a_scale_inv": scale}, tmp_path / SINGLE_NAME)

    def halves(name, shape):
        base, suffix = name.removesuffix("_scale_inv"), "_scale_inv" if name.endswith("_scale_inv") else ""
        return {f"{part}{suffix}": index for part, index in rows_of(base, shape).items()}

    wanted = {f"a.{part}": ((256, 128), FP8 if kept else F32) for part in ("top", "bottom")}
    wanted |= {f"a.{part}_scale_inv": ((2, 1), F32) for part in ("top", "bottom") if kept}
    model = stand_in(wanted)
    load_weights(model, tmp_path, parts_of=halves, progress=False)
    state = model.state_dict()
    for part, rows in (("top", slice(0, 256)), ("bottom", slice(256, 512))):
        if kept:
            assert torch.equal(state[f"a.{part}"].float(), q[rows].float())
            assert torch.equal(state[f"a.{part}_scale_inv"], scale[rows.start // 128 : rows.stop // 128])
        else:
            assert torch.equal(state[f"a.{part}"], dequantize_per_block(q, scale)[rows])


def test_slices_that_cut_a_block(tmp_path):
    save_file({"a": torch.ones(192, 128).to(FP8), "a_scale_inv": torch.ones(2, 1)}, tmp_path / SINGLE_NAME)
    parts = {"a": rows_of("a", (192, 128)), "a_scale_inv": {"a.top_scale_inv": (0,), "a.bottom_scale_inv": (1,)}}
    model = stand_in({"a.top": ((96, 128), BF16), "a.bottom": ((96, 128), BF16)})
    message = failure(model, tmp_path, parts_of=lambda name, shape: parts.get(name, {name: ()}))
    assert "a.bottom (stored as a[96:]) is F8_E4M3 and cut at 96, inside a block of 128" in message


def test_every_problem_with_slices_comes_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *arguments: pytest.fail("read before validation was done"))
    save_file({"x.a": torch.ones(4, 6), "x.b": torch.ones(4, 6), "x.c": torch.ones(2)}, tmp_path / SINGLE_NAME)
    wanted = {"a.top": ((2, 6), F32), "a.bottom": ((2, 5), F32), "b.top": ((2, 6), F32), "b.side": ((1,), F32)}

    def parts_of(name, shape):
        if name == "c":
            raise CheckpointError("belongs to another model")
        return rows_of(name, shape)

    message = failure(stand_in(wanted), tmp_path, name_of=lambda name: name[2:], parts_of=parts_of)
    assert message.splitlines()[0] == f"{tmp_path}: 4 problems, nothing was loaded:"
    file = "model.safetensors: "
    assert f"{file}a.bottom (stored as x.a[2:]) has shape [2, 6]; the model expects [2, 5]" in message
    assert f"{file}unexpected b.bottom (stored as x.b[2:]) (F32 [2, 6])" in message
    assert f"{file}x.c: belongs to another model" in message
    assert "b.side: missing; the model expects F32 [1]" in message


def test_two_names_for_one_tensor(tmp_path):
    save_file({"x.a": torch.ones(2), "y.a": torch.ones(2)}, tmp_path / SINGLE_NAME)
    message = failure(stand_in({"a": ((2,), F32)}), tmp_path, name_of=lambda name: name[2:])
    assert "1 problem" in message and "is there twice, as " in message
    assert "x.a" in message and "y.a" in message


# What is wrong with the files themselves. None of it needs a model.


def edit_header(path, change):
    """Lets `change` alter the header, keeping the data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def truncate(path, size):
    os.truncate(path, path.stat().st_size + size if size < 0 else size)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: p.unlink(), f"missing, though {INDEX_NAME} lists it"),
        (lambda p: truncate(p, -1), "truncated: "),
        (lambda p: truncate(p, 20), "truncated: 20 bytes, its header alone needs"),
        (lambda p: truncate(p, 3), "truncated: 3 bytes"),
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "too long: "),
        (
            lambda p: p.write_bytes((5).to_bytes(8, "little") + b"hello"),
            "not a safetensors file: byte 0 of its header should begin a",
        ),
        (
            lambda p: edit_header(p, lambda h: h["norm.weight"].pop("dtype")),
            "has the fields ['shape', 'data_offsets']; accepted: ",
        ),
        (lambda p: edit_header(p, lambda h: h["norm.weight"].update(shape=[5])), "norm.weight is F32 [5] but has 16"),
        (lambda p: edit_header(p, lambda h: h.pop("layer.ids")), "starts at byte 40 of the data, expected 0"),
    ],
)
def test_damaged_file(tmp_path, shards, damage, expected, monkeypatch):
    write(tmp_path, *shards)
    Checkpoint(tmp_path)
    damage(tmp_path / "2.st")
    monkeypatch.setattr(directory_module, "safe_open", lambda *arguments, **options: pytest.fail("opened for reading"))
    message = failure(stand_in(like({**shards[0], **shards[1]})), tmp_path)
    assert message.startswith(f"{tmp_path}: 1 problem, nothing was loaded:\n  2.st: ")
    assert expected in message


def test_every_damaged_file_is_named(tmp_path, shards):
    write(tmp_path, *shards, {"z": torch.ones(3)})
    truncate(tmp_path / "1.st", -1)
    (tmp_path / "3.st").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*1\.st: truncated.*3\.st: missing"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"weight_map": {"a": "1.st", "b": "2.st", "c": "1.st"}}, f"1.st: lacks c, which {INDEX_NAME} puts there"),
        ({"weight_map": {"a": "2.st", "b": "2.st"}}, f"2.st: lacks a, which {INDEX_NAME} puts there; found in no file"),
        ({"weight_map": {"a": "1.st", "b": "1.st", "x": "2.st"}}, "1.st: lacks b"),
        ({"weight_map": {"a": "1.st", "b": "1.st", "x": "2.st"}}, "found in 2.st"),
        ({"weight_map": {"b": "2.st", "c": "1.st"}}, f"1.st: holds a, which {INDEX_NAME} does not list"),
        (
            '{"weight_map": {"a": "1.st", "b": "2.st", "b": "1.st"}}',
            f"{INDEX_NAME}: 'b' is listed twice in one JSON object",
        ),
        ({"weight_map": {"a": "../1.st"}}, "'../1.st' is not the name of a file in this directory"),
        ({"weight_map": ["a"]}, 'expected {"weight_map": {tensor: file, ...}}'),
        ({"weight_map": {"a": 1}}, "weight_map gives a the file 1; accepted: a file's name"),
        ({}, "got the fields []"),
        ("{", "not valid JSON: Expecting property name"),
    ],
)
def test_index_that_disagrees(tmp_path, index, expected):
    write(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)}, index=index)
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        Checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path):
    write(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.zeros(1), "c": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"1 problem,.*\n  a: in two files, 1\.st and 2\.st"):
        Checkpoint(tmp_path)


def test_no_checkpoint_and_two(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}: holds no {INDEX_NAME} and no {SINGLE_NAME}")):
        Checkpoint(tmp_path)
    write(tmp_path, {"a": torch.ones(1)})
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE_NAME)
    with pytest.raises(CheckpointError, match=f"holds both {INDEX_NAME} and {SINGLE_NAME}"):
        Checkpoint(tmp_path)


# Whole checkpoints.


TORCH_DTYPES = {"F8_E4M3": FP8, "BF16": torch.bfloat16, "F32": torch.float32}


def is_mtp(name):
    return name.startswith("model.layers.4.")


def tiny_tensors(directory):
    manifest = deepseek_v32_tensor_manifest(read_config(directory))
    return {name: (shape, TORCH_DTYPES[dtype]) for name, (shape, dtype) in manifest.items() if not is_mtp(name)}


def test_tiny_checkpoint_round_trip(tiny):
    model = stand_in(tiny_tensors(tiny))
    load_weights(model, tiny, skip=is_mtp, progress=False)
    state = model.state_dict()
    for path in tiny.glob("*.safetensors"):
        for name, stored in load_file(path).items():
            assert is_mtp(name) or torch.equal(state.pop(name).view(torch.uint8), stored.view(torch.uint8)), name
    assert not state


def test_tiny_checkpoint_dequantised(tiny):
    model = stand_in({n: (shape, BF16) for n, (shape, _) in tiny_tensors(tiny).items() if not n.endswith("_inv")})
    load_weights(model, tiny, skip=is_mtp, progress=False)
    checkpoint = Checkpoint(tiny)
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
    q, scale = checkpoint.read(name), checkpoint.read(f"{name}_scale_inv")
    assert scale.shape == (5, 4)
    rows, columns = torch.meshgrid(torch.arange(576) // 128, torch.arange(512) // 128, indexing="ij")
    assert torch.equal(model.state_dict()[name], (q.float() * scale[rows, columns]).bfloat16())
    assert torch.equal(model.state_dict()["model.norm.weight"], checkpoint.read("model.norm.weight").bfloat16())


def test_many_tensors(tmp_path):
    """A quarter of the published number of tensors; anything quadratic in it would take minutes."""
    names = [f"layers.{layer}.experts.{expert}.w{i}" for layer in range(30) for expert in range(256) for i in range(3)]
    data = torch.arange(len(names), dtype=torch.float32).view(-1, 1)
    quarter = len(names) // 4
    write(tmp_path, *({n: data[i] for i, n in enumerate(names) if i // quarter == shard} for shard in range(4)))
    model = stand_in(dict.fromkeys(names, ((1,), torch.float32)))
    load_weights(model, tmp_path, progress=False)
    assert model.state_dict()["layers.29.experts.255.w2"].item() == len(names) - 1
