"""Checkpoint tensors that fuse several model weights, and model weights that are split over several tensors."""

import pytest
import torch
from safetensors.torch import save_file

from dsa import dequantize_per_block, per_block_cast_to_fp8
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import SINGLE_NAME, Checkpoint
from dsa_layers.io.weights import load_weights
from tests.layers.io.stand_ins import BF16, F32, FP8, failure, stand_in


def rows_of(name, shape):
    """Each half of the rows is a tensor of its own, and such a half is whole."""
    if "." in name:
        return {name: ()}
    middle = shape[0] // 2
    return {f"{name}.top": (slice(0, middle),), f"{name}.bottom": (slice(middle, None),)}


def test_slices(tmp_path):
    values = torch.arange(24).view(4, 6).float()
    save_file({"a": values}, tmp_path / SINGLE_NAME)
    model = stand_in({"a.top": ((2, 6), F32), "a.bottom": ((2, 6), BF16)})
    load_weights(model, tmp_path, parts_of=rows_of, progress=False)
    assert torch.equal(model.a.top, values[:2]) and torch.equal(model.a.bottom, values[2:].bfloat16())


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
