"""Models over 2 and 4 processes beside one: logits, generated tokens, and what every rank holds."""

import contextlib
import functools
import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import dsa
from dsa.testing import calc_diff
from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint import loading
from dsa_layers.errors import CheckpointError
from dsa_layers.families.registry import family, model_types
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.parallel.cuts import DoesNotDivide
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.tiny import write_tiny_checkpoint, writer
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import WAYS, split_by

OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}
# More tokens than are selected, in two sequences whose rows are shared, and in two passes whose rows are whole.
TOKENS, LENGTHS = [2 + i * i % 2000 for i in range(260)], [170, 90]
PROMPTS = [TOKENS[:150], TOKENS[:3], TOKENS[7:20]]
SPLITS = [(model, quantized, 2) for model in model_types() for quantized in (True, False)]
SPLITS += [(model, False, 4) for model in model_types() if model != "deepseek_v4"]  # it has 2 groups of heads
FUSED = "experts in one tensor"
SPLITS += [(FUSED, False, 2)]
# What three and four ranks can share of it: heads, groups of them, experts, channels in blocks of 128, a vocabulary.
OF_FOUR, OF_THREE = "deepseek_v4 in four groups", "deepseek_v32 in thirds"
OTHERS = {
    OF_FOUR: ("deepseek_v4", {"num_attention_heads": 8, "o_groups": 4}),
    OF_THREE: (
        "deepseek_v32",
        {"num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6, "vocab_size": 2304}
        | {"intermediate_size": 384, "moe_intermediate_size": 384, "n_group": 2, "topk_group": 1},
    ),
}
SPLITS += [(OF_FOUR, False, 4), (OF_THREE, False, 3)]


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint, tmp_path_factory):
    """{(family, quantised): its directory}, to be read only; FUSED is deepseek_v32 as transformers' modules name it."""
    cases = [(model, quantized) for model in model_types() for quantized in (True, False)]
    made = {case: tiny_checkpoint(*case) for case in cases}
    for name, (model, changes) in OTHERS.items():
        made[name, False] = tmp_path_factory.mktemp("other")
        of_family = family(model)
        of_family = replace(of_family, tiny=replace(of_family.tiny, changes=of_family.tiny.changes | changes))
        with mock.patch.object(writer, "family", lambda _, of_family=of_family: of_family):
            write_tiny_checkpoint(made[name, False], model=model, quantized=False)
    made[FUSED, False] = tmp_path_factory.mktemp("fused")
    fuse(made["deepseek_v32", False], made[FUSED, False])
    return made


def fuse(directory, fused):
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        weights = [
            [tensors.pop(f"{layer}.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(8)
        ]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
        tensors[f"{layer}.experts.down_proj"] = torch.stack([down for *_, down in weights])
    for path in directory.glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, fused)
    save_file(tensors, fused / "model.safetensors")


def of_rank(ranks, directories, options=OPTIONS, way="queries"):
    with split_by(way):
        return [outcome(load_model(directory, mesh=ranks, **options)) for directory in directories]


def logits_of(model):
    with torch.inference_mode():
        return model(torch.tensor(TOKENS), SequenceBatch.without_cache(LENGTHS), all_tokens=True)


def outcome(model):
    """(logits of all tokens, generated tokens, weights' shapes). Four steps behind the prompts: in deepseek_v4 every
    sequence gets an entry of four tokens in them."""
    generator = Generator(model, None, cache_tokens=2048, prefill_chunk=100)
    completions = generator.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    weights = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return logits_of(model), [completion.tokens for completion in completions], weights


@functools.cache
def alone(directory):
    """What one process computes: several tests' expectation, of which each model takes seconds."""
    return outcome(load_model(directory, **OPTIONS))


@pytest.mark.parametrize(("size", "way"), [(2, "queries"), (2, "heads"), (3, "queries"), (4, "queries")])
def test_ranks_compute_what_one_process_does(checkpoints, size, way):
    """All models in the same processes, which are slow to start."""
    cases = [case[:2] for case in SPLITS if case[2] == size]
    of_ranks = in_ranks(size, of_rank, [checkpoints[case] for case in cases], OPTIONS, way)
    for i, case in enumerate(cases):
        found = [of_one[i] for of_one in of_ranks]
        logits, tokens, whole = alone(checkpoints[case])
        for part_logits, part_tokens, parts in found:
            assert (part_logits - logits).abs().max() <= 2e-5 * logits.abs().max(), case
            assert part_tokens == tokens, case
            assert torch.equal(part_logits, found[0][0]), case  # bit for bit: they select the same keys
            assert parts.keys() == whole.keys(), case
        held = [sum(torch.Size(shape).numel() for shape in parts.values()) for *_, parts in found]
        share = held[0] / sum(torch.Size(shape).numel() for shape in whole.values())
        assert len(set(held)) == 1 and share < {"queries": 0.8, "heads": 0.75}[way], case


def with_drafts(ranks, directories):
    """By the ways of splitting."""
    found = {}
    for way in WAYS:
        with split_by(way):
            models = [load_model(directory, mesh=ranks, drafter=True, **OPTIONS) for directory in directories]
            found[way] = [drafted(model) for model in models]
    return found


def drafted(model):
    """The first prompt has more entries of deepseek_v4 than are selected, and shares its rows."""
    generator = Generator(model, None, cache_tokens=2048, draft_tokens=2)
    prompts = [TOKENS + TOKENS[:10], TOKENS[7:20]]
    return [c.tokens for c in generator.generate(prompts, SamplingParams(max_new_tokens=5))]


def test_drafters_are_split_too(checkpoints):
    """A pass over a prompt shares its rows; drafts do not."""
    directories = [checkpoints[model, False] for model in model_types()]
    first, second = in_ranks(2, with_drafts, directories)
    of_one = [drafted(load_model(path, drafter=True, **OPTIONS)) for path in directories]
    assert first == second == dict.fromkeys(WAYS, of_one)


def test_quantised_weights(checkpoints):
    """FP8 and FP4 as they are: projections, experts and index keys in FP8, and bytes in the cache."""
    options = OPTIONS | {"dequantize": False}
    directories = [checkpoints[model, True] for model in model_types()]
    first, second = in_ranks(2, of_rank, directories, options)
    for model, directory, (logits, tokens, _), (other, other_tokens, _) in zip(
        model_types(), directories, first, second
    ):
        whole = logits_of(load_model(directory, **options))
        assert torch.equal(logits, other) and tokens == other_tokens, model
        # A rounding to FP8 falls the other way now and then, and with random weights another key or expert is chosen.
        assert calc_diff(logits, whole) < 0.05, model
        apart = (logits - whole).norm(dim=1) / whole.norm(dim=1)
        assert apart.median() < 0.1, model


def test_experts_that_no_token_chooses(checkpoints):
    """Of a rank whose experts have no rows, and of a pass in which all are another rank's."""
    in_ranks(2, one_token_at_a_time, checkpoints["deepseek_v32", True])


def one_token_at_a_time(ranks, directory):
    model = load_model(directory, mesh=ranks, **OPTIONS | {"dequantize": False})
    for token in range(5, 25):
        with torch.inference_mode():
            logits = model(torch.tensor([token]), SequenceBatch.without_cache([1]))
        assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("model", "quantized", "size", "what"),
    [
        ("deepseek_v32", True, 3, "3 do not evenly share the 2048 tokens of model.embed_tokens"),
        (
            "deepseek_v32",
            True,
            4,
            "4 do not evenly share the 6 blocks of 128 rows of model.layers.0.self_attn.q_b_proj",
        ),
        ("glm_moe_dsa", True, 4, "4 do not evenly share the 14 blocks of 128 rows of .*kv_b_proj"),
        ("deepseek_v4", False, 4, "4 do not evenly share the 2 groups of attention heads of layers.0.attn"),
        ("deepseek_v4", False, 16, "16 do not evenly share the 8 attention heads"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide(checkpoints, model, quantized, size, what):
    """Before anything is read, so on a rank by itself."""
    with pytest.raises(DoesNotDivide, match=rf"^gpus: {what}"):
        load_model(checkpoints[model, quantized], mesh=Ranks(0, size), **OPTIONS)


def test_an_expert_too_many_is_not_another_rank_s(checkpoints, tmp_path):
    shutil.copytree(checkpoints["deepseek_v32", False], tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    place = index["weight_map"][name.format(0)]
    with safe_open(tmp_path / place, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    save_file(tensors | {name.format(8): tensors[name.format(0)].clone()}, tmp_path / place)
    index["weight_map"][name.format(8)] = place
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for rank in range(2):
        with pytest.raises(CheckpointError, match=rf"unexpected {name.format(8)}"):
            load_model(tmp_path, mesh=Ranks(rank, 2), **OPTIONS)


def broken(ranks, directory):
    try:
        load_model(directory, mesh=ranks, **OPTIONS)
    except CheckpointError as error:
        return str(error)


def test_what_one_rank_misses_all_raise(checkpoints, tmp_path):
    shutil.copytree(checkpoints["deepseek_v32", False], tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.experts.7.down_proj.weight"  # the second rank's
    path = tmp_path / index["weight_map"].pop(name)
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if key != name}
    save_file(tensors, path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    first, second = in_ranks(2, broken, tmp_path)
    assert f"{name}: missing" in second and first == f"{second} (rank 1)"


def without_room(ranks, directory):
    load_weights = loading.load_weights
    if ranks.rank == 1:
        loading.load_weights = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    try:
        return broken(ranks, directory)
    finally:
        loading.load_weights = load_weights


def test_a_rank_without_room_is_an_error_of_all(checkpoints):
    """Of one kind, so that all end alike and the first one alone speaks."""
    first, second = in_ranks(2, without_room, checkpoints["deepseek_v32", True])
    assert second == "CUDA out of memory" and first == "CUDA out of memory (rank 1)"


def of_two_checkpoints(ranks, directories):
    try:
        load_model(directories[ranks.rank], mesh=ranks, **OPTIONS)
    except ValueError as error:
        return str(error)


def test_ranks_with_different_weights(checkpoints, tmp_path):
    """Of the same names and shapes, as of another training: all that differs are numbers."""
    write_tiny_checkpoint(tmp_path, model="deepseek_v32", quantized=False, seed=7)
    assert_different(in_ranks(2, of_two_checkpoints, [checkpoints["deepseek_v32", False], tmp_path]))


def test_ranks_with_different_checkpoints(checkpoints):
    assert_different(in_ranks(2, of_two_checkpoints, [checkpoints["deepseek_v32", q] for q in (True, False)]))


def assert_different(said):
    first, second = said
    assert first == second
    assert re.fullmatch(
        r"checkpoint: must be the same on all ranks, got one of digest \w{12} on rank 0 and one of digest \w{12} on "
        "rank 1",
        first,
    )


def of_other_machines(ranks, directory):
    """What a rank hears of versions, and of GPUs, that are not the same on both."""
    facts, own = loading._facts, torch.device("cuda", 0)
    differs = {
        "dsa": [(dsa, "__version__", ("1.0", "1.1")[ranks.rank])],
        "torch": [(torch, "__version__", ("2.11.0", "2.12.0")[ranks.rank])],
        "device": [
            (torch.cuda, "get_device_name", lambda _: ("NVIDIA H100", "NVIDIA H200")[ranks.rank]),
            (loading, "_facts", lambda checkpoint, precision, _: facts(checkpoint, precision, own)),
        ],
    }
    said = {}
    for what, patches in differs.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            said[what] = broken_at_all(ranks, directory)
    return said


def broken_at_all(ranks, directory):
    with pytest.raises(CheckpointError) as raised:
        load_model(directory, mesh=ranks, **OPTIONS)
    return str(raised.value)


def test_ranks_with_different_versions_or_gpus(checkpoints):
    first, second = in_ranks(2, of_other_machines, checkpoints["deepseek_v32", False])
    assert first == second
    same = "must be the same on all ranks, got"
    assert first["dsa"] == f"dsa: {same} 1.0 on rank 0 and 1.1 on rank 1"
    assert first["torch"] == f"torch: {same} 2.11.0 on rank 0 and 2.12.0 on rank 1"
    assert first["device"] == f"device: {same} NVIDIA H100 on rank 0 and NVIDIA H200 on rank 1"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_has_the_progress_bar(checkpoints, rank, monkeypatch):
    bars, load_weights = [], loading.load_weights

    def noted(*arguments, progress, **options):
        bars.append(progress)
        load_weights(*arguments, progress=False, **options)

    monkeypatch.setattr(loading, "load_weights", noted)
    load_model(checkpoints["deepseek_v32", False], mesh=Ranks(rank, 2), **OPTIONS | {"progress": True})
    assert bars == [rank == 0]


def of_mesh(ranks, directory):
    mesh = init_device_mesh("cpu", (ranks.size,))
    logits = logits_of(load_model(directory, mesh=mesh, **OPTIONS))
    square = init_device_mesh("cpu", (1, ranks.size), mesh_dim_names=("replicas", "heads"))
    with pytest.raises(ValueError, match=r"^mesh: must have one dimension, got 2; one of several is mesh\[its name\]"):
        load_model(directory, mesh=square, **OPTIONS)
    also = logits_of(load_model(directory, mesh=square["heads"], **OPTIONS))
    return logits, also


def test_a_mesh(checkpoints):
    directory = checkpoints["deepseek_v32", False]
    whole, *_ = alone(directory)
    for found in in_ranks(2, of_mesh, directory):
        for logits in found:
            assert (logits - whole).abs().max() <= 2e-5 * whole.abs().max()


def test_wrong_meshes(checkpoints):
    directory = checkpoints["deepseek_v32", False]
    with pytest.raises(TypeError, match=r"^mesh: must be a DeviceMesh, Ranks or None, got int"):
        load_model(directory, mesh=2, **OPTIONS)
    with pytest.raises(
        ValueError, match=r"^trainable: a part of a model takes no gradient; accepted on one rank, got 2"
    ):
        load_model(directory, mesh=Ranks(0, 2), trainable=True, **OPTIONS)


def test_one_rank_is_the_whole_model(checkpoints):
    """Whatever its blocks: nothing is cut."""
    directory = checkpoints["glm_moe_dsa", True]
    for mine, theirs in zip(outcome(load_model(directory, mesh=Ranks(0, 1), **OPTIONS)), alone(directory)):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_part_s_shape_is_not_taken_for_the_whole(checkpoints, tmp_path, way):
    shutil.copytree(checkpoints["deepseek_v32", False], tmp_path, dirs_exist_ok=True)
    name = "model.layers.1.self_attn.q_b_proj.weight"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    path = tmp_path / index["weight_map"][name]
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    save_file(tensors | {name: tensors[name][:384].contiguous()}, path)
    expected = rf"{name}:? has shape \[384, 256\]; the model expects \[768, 256\]"
    with split_by(way), pytest.raises(CheckpointError, match=expected):
        load_model(tmp_path, mesh=Ranks(1, 2), **OPTIONS)
