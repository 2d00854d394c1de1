"""A rank that holds a whole layer also has its `part`: some heads of attention, or some channels of a shared expert."""

import pytest
import torch

from dsa_layers import Ranks, load_model
from dsa_layers.engine import joint_linear
from dsa_layers.engine.fused_moe import FusedSwiGLU
from dsa_layers.engine.split import copied, make_parts
from dsa_layers.models.registry import FAMILIES
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.parallel.ways import OPTIONS, split_by

SECOND = Ranks(1, 2)


def layers_with_parts(model):
    return [(name, module) for name, module in model.named_modules() if getattr(module, "part_of_ranks", None)]


def second_half(shared_expert):
    """Cut a shared expert, in place, to the channels of the second of two ranks, and return it."""
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        for parameter in shared_expert.get_submodule(name).parameters():
            parameter.data = parameter.chunk(2, dim)[1].contiguous()
    return shared_expert


@torch.inference_mode()
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("model", FAMILIES)
def test_a_part_has_the_ranks_heads_or_channels(tiny_checkpoint, model, name):
    """A part has views of the layer's parameters, but adjacent copies of an FP8 shared expert's joint projections."""
    directory, options = tiny_checkpoint(model), OPTIONS[name] | {"drafter": has_drafter(model)}
    whole, split = load_model(directory, **options), load_model(directory, mesh=SECOND, **options)
    with split_by("heads"):
        of_heads = load_model(directory, mesh=SECOND, **options)
    layers = layers_with_parts(split)
    assert {path.partition(".")[0] for path, _ in layers} > ({"drafter"} if has_drafter(model) else set())
    for path, layer in layers:
        assert_same_tensors(layer.state_dict(), whole.get_submodule(path).state_dict())
        memory = {x.untyped_storage().data_ptr() for x in layer.parameters()}
        copies = [x for x in layer.part.parameters() if x.untyped_storage().data_ptr() not in memory]
        assert {id(x) for x in copies} == {id(x) for x in copied(layer.part)}, path
        if not isinstance(layer, FusedSwiGLU):
            expected = of_heads.get_submodule(path)
            assert layer.part.n_heads == expected.n_heads == layer.n_heads // 2 and expected.part is None
            assert_same_tensors(layer.part.state_dict(), expected.state_dict())
            assert not copies
            continue
        expected = second_half(whole.get_submodule(path))
        assert_same_tensors(layer.part.state_dict(), expected.state_dict())
        assert len(copies) == (4 if name == "fp8" else 0)
        if name == "fp8":
            assert joint_linear._whole(layer.joint_layers()) and joint_linear._whole(layer.part.joint_layers())
        for count in (1, 3, 70):
            x = torch.randn(count, split.config.hidden_size).to(options["dtype"])
            y = expected.product(x, None)
            assert torch.equal(layer.part.product(x, None), y) or name == "fp32"
            torch.testing.assert_close(layer.part.product(x, None), y, rtol=0, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("assign", [False, True])
def test_parts_that_are_made_again_have_the_loaded_weights(tiny_checkpoint, assign):
    model = load_model(tiny_checkpoint("deepseek_v32"), mesh=SECOND, **OPTIONS["fp8"])
    parts = [(layer.part, *layer.part.state_dict().values()) for _, layer in layers_with_parts(model)]
    expected = [[x.float() * 2 if x.dtype == torch.float32 else x for x in before] for _, *before in parts]
    state = {key: x * 2 if x.dtype == torch.float32 else x.clone() for key, x in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    make_parts(model)
    for (_, layer), of_part in zip(layers_with_parts(model), expected, strict=True):
        for x, doubled in zip(layer.part.state_dict().values(), of_part, strict=True):
            assert torch.equal(x.float(), doubled.float())
