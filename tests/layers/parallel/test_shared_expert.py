"""Shared experts that every rank has whole: what it holds, its part of them, and work during the exchange."""

import copy
import functools
import time
from pathlib import Path

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.engine.split import copy_own_parts
from dsa_layers.families.registry import model_types
from dsa_layers.layers import joint_linear
from dsa_layers.layers.moe import MoE, SharedExpert, SwiGLU
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.parallel.rows import SharedRows
from tests.layers.parallel.processes import in_ranks

OPTIONS = {
    "fp32": {"dtype": torch.float32, "dequantize": True, "progress": False},
    "fp8": {"dtype": torch.bfloat16, "progress": False},
}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint):
    return {model: tiny_checkpoint(model) for model in model_types()}


def mixtures(model):
    """(name, layer) of all, the drafter's among them."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]


def cut(shared, rank, size):
    """A rank's channels of a shared expert, cut out of it by hand."""
    part = copy.deepcopy(shared)
    part.own_part = None
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        layer = part.get_submodule(name)
        for parameter in layer.parameters():
            parameter.data = parameter.chunk(size, dim)[rank].contiguous()
    return part


@torch.inference_mode()
@pytest.mark.parametrize("name", OPTIONS)
def test_a_rank_has_all_of_it_and_its_channels(checkpoints, name):
    """Products of these are those of weights that are cut, and one for gate and up."""
    for model, directory in checkpoints.items():
        whole = load_model(directory, drafter=True, **OPTIONS[name])
        part = load_model(directory, drafter=True, mesh=Ranks(1, 2), **OPTIONS[name])
        assert [path for path, _ in mixtures(part)] == [path for path, _ in mixtures(whole)]
        assert any(path.startswith("drafter.") for path, _ in mixtures(part))
        for (path, mine), (_, theirs) in zip(mixtures(part), mixtures(whole)):
            shared, expected = mine.shared_experts, theirs.shared_experts.state_dict()
            assert shared.state_dict().keys() == expected.keys()
            assert all(torch.equal(x, expected[key]) for key, x in shared.state_dict().items()), (model, path)
            of_channels, own = cut(shared, 1, 2), shared.part()
            states = own.state_dict(), of_channels.state_dict()
            assert all(torch.equal(x, states[1][key]) for key, x in states[0].items()), (model, path)
            # In FP8 rows are copied, so that one product has both; columns are read where they are.
            memory = {x.untyped_storage().data_ptr() for x in shared.parameters()}
            copied = [key for key, x in states[0].items() if x.untyped_storage().data_ptr() not in memory]
            assert len(copied) == len(shared.own_part.copies(shared)) == (4 if name == "fp8" else 0)
            assert not any(key.startswith("down_proj") for key in copied)
            for layer in (own, shared) if name == "fp8" else ():
                assert joint_linear._whole(layer.joint_layers()) is not None, (model, path)
            for count in (1, 3, 70):
                x = torch.randn(count, part.config.hidden_size).to(OPTIONS[name]["dtype"])
                y = of_channels(x)
                if name == "fp8":
                    assert torch.equal(shared(x), y), (model, path)
                else:
                    assert (shared(x) - y).abs().max() < 1e-5 * y.abs().max(), (model, path)
                rows = SharedRows(Ranks(1, 2), 2 * count)
                assert torch.equal(shared(x, rows=rows), theirs.shared_experts(x)), (model, path)


@pytest.mark.parametrize("assign", [False, True])
def test_copies_stay_where_a_graph_reads_them(checkpoints, assign):
    """Side by side, where the model loads other weights, and where it stays as it is or leaves the device; columns,
    which are no copies, follow."""
    part = load_model(checkpoints["deepseek_v32"], mesh=Ranks(1, 2), **OPTIONS["fp8"])
    shared = mixtures(part)[0][1].shared_experts
    kept = shared.own_part.copies(shared)
    before = [x.clone() for x in kept]
    state = {key: x.clone() for key, x in part.state_dict().items()}
    for key, x in state.items():
        if ".shared_experts." in key:
            state[key] = (x.float() * 2).to(x.dtype)
    part.load_state_dict(state, assign=assign)
    for again in (shared, shared.to("cpu")):
        now, of_channels = again.part(), cut(again, 1, 2)
        assert all(x is y for x, y in zip(kept, again.own_part._parts.copies, strict=True))
        assert joint_linear._whole(now.joint_layers()) is not None
        assert all(torch.equal(x, y) for x, y in zip(now.parameters(), of_channels.parameters()))
        assert not any(torch.equal(x, old) for x, old in zip(kept, before))
    other = copy.deepcopy(shared)  # which has copies of its own
    assert not other.own_part._parts.copies
    mine, theirs = other.part().gate_proj.weight_scale_inv, shared.part().gate_proj.weight_scale_inv
    assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
    shared.to("meta")
    assert all(x.is_meta for x in shared.own_part._parts.copies)


@pytest.mark.parametrize("inference", [False, True])
def test_copies_follow_the_weights(checkpoints, inference):
    """Also parameters of inference mode, and after changes that PyTorch does not count."""
    part = load_model(checkpoints["deepseek_v32"], mesh=Ranks(0, 2), **OPTIONS["fp8"])
    shared = mixtures(part)[0][1].shared_experts
    with torch.inference_mode(inference):
        state = {name: torch.nn.Parameter(x.clone(), requires_grad=False) for name, x in shared.state_dict().items()}
        shared.load_state_dict(state, assign=True)
        scale = shared.gate_proj.weight_scale_inv
        assert scale.is_inference() == inference
        before = shared.part().gate_proj.weight_scale_inv
        scale.mul_(2)
        assert shared.part().gate_proj.weight_scale_inv is before
        assert torch.equal(before, scale.chunk(2)[0])
    scale.data.mul_(2)
    copy_own_parts(part)
    assert torch.equal(before, scale.chunk(2)[0])


def test_dense_mlps_are_cut(checkpoints):
    part = load_model(checkpoints["deepseek_v32"], mesh=Ranks(1, 2), **OPTIONS["fp8"])
    dense = [module for module in part.modules() if type(module) is SwiGLU]
    assert dense and not any(hasattr(module, "own_part") for module in dense)
    assert dense[0].gate_proj.weight.shape[0] == part.config.intermediate_size // 2


COUNT = 270  # rows of a pass whose rows are shared
PATIENCE = 20  # seconds for what takes one


def await_file(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path.name}: the first rank waits for this one before it computes"
        time.sleep(0.01)


def after(function, do):
    """The function, which calls `do` when it has run."""

    def call(*arguments, **options):
        result = function(*arguments, **options)
        do()
        return result

    return call


def before(function, do):
    """The function, which first calls `do`."""

    def call(*arguments, **options):
        do()
        return function(*arguments, **options)

    return call


@torch.inference_mode()
def with_a_late_rank(ranks, directory, folder):
    """(whether the result is as ever, what the first rank has computed when it begins each exchange). The second rank
    sends its rows after the first one has chosen experts, and its part of the sum after the first one has computed the
    shared expert."""
    moe = mixtures(load_model(directory, mesh=ranks, **OPTIONS["fp8"]))[-1][1]
    x = torch.randn(COUNT, moe.experts.down_proj.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = SharedRows(ranks, COUNT)
    cast = tuple(map(rows.own, moe.shared_experts.gate_proj.cast(x)))
    expected = moe(rows.own(x), cast=cast, rows=rows)

    chosen, shared, begun = folder / "chosen", folder / "shared", []

    def note(name):
        begun.append((name, chosen.exists(), shared.exists()))

    if ranks.rank == 0:
        changes = [
            (type(moe.gate), "forward", after, chosen.touch),
            (SharedExpert, "forward", after, shared.touch),
            (SharedRows, "_begin_gather", before, functools.partial(note, "gather")),
            (SharedRows, "_begin_sum", before, functools.partial(note, "sum")),
        ]
    else:
        changes = [
            (SharedRows, "_begin_gather", before, functools.partial(await_file, chosen)),
            (SharedRows, "_begin_sum", before, functools.partial(await_file, shared)),
        ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, wrap, do in changes:
            patch.setattr(owner, name, wrap(getattr(owner, name), do))
        late = moe(rows.own(x), cast=cast, rows=rows)
    return torch.equal(late, expected), begun


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_ranks_compute_while_they_await_others(checkpoints, model, tmp_path):
    first, second = in_ranks(2, with_a_late_rank, checkpoints[model], tmp_path)
    begun = [("gather", False, False), ("gather", True, False), ("sum", True, False)]
    assert first == (True, begun) and second == (True, [])
