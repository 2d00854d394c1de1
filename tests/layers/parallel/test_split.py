"""Models over 2 and 4 processes beside one: logits, generated tokens, and what every rank holds."""

import contextlib
import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import dsa
from dsa.testing import calc_diff
from dsa_layers import load_model
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.errors import CheckpointError
from dsa_layers.families.registry import family, model_types
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io import loading
from dsa_layers.parallel.cuts import DoesNotDivide
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.tiny import write_tiny_checkpoint, writer
from dsa_layers.training.indexer_stage import IndexerStage
from tests.layers.io.stand_ins import changed
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
    made[FUSED, False] = changed(made["deepseek_v32", False], tmp_path_factory.mktemp("fused"), fuse)
    return made


def fuse(tensors):
    """Put the experts of each layer into one tensor, as transformers' modules hold them."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        weights = [
            [tensors.pop(f"{layer}.experts.{e}.{p}_proj.weight") for p in ("gate", "up", "down")] for e in range(8)
        ]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in weights])
        tensors[f"{layer}.experts.down_proj"] = torch.stack([down for *_, down in weights])


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
    completions = generator.generate(PROMPTS, SamplingParams(max_tokens=5))
    weights = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return logits_of(model), [completion.tokens for completion in completions], weights


@functools.cache
def alone(directory):
    """What one process computes: several tests' expectation, of which each model takes seconds."""
    return outcome(load_model(directory, **OPTIONS))


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (2, "queries"),
        (3, "queries"),
        pytest.param(2, "heads", marks=pytest.mark.slow),
        pytest.param(4, "queries", marks=pytest.mark.slow),
    ],
)
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


def quantised_logits(ranks, directories):
    """Also single tokens: a rank's experts may have no rows then, and in some passes all are another rank's."""
    found = []
    for directory in directories:
        model = load_model(directory, mesh=ranks, **OPTIONS | {"dequantize": False})
        with torch.inference_mode():
            for token in range(5, 15):
                assert model(torch.tensor([token]), SequenceBatch.without_cache([1])).isfinite().all()
        found.append(logits_of(model))
    return found


@pytest.mark.slow
def test_quantised_weights(checkpoints):
    """FP8 and FP4 as they are: projections, experts and index keys."""
    models = ("deepseek_v32", "deepseek_v4")
    directories = [checkpoints[model, True] for model in models]
    first, second = in_ranks(2, quantised_logits, directories)
    for model, directory, logits, other in zip(models, directories, first, second, strict=True):
        whole = logits_of(load_model(directory, **OPTIONS | {"dequantize": False}))
        assert torch.equal(logits, other), model
        # A rounding to FP8 falls the other way now and then, and with random weights another key or expert is chosen.
        assert calc_diff(logits, whole) < 0.05, model
        apart = (logits - whole).norm(dim=1) / whole.norm(dim=1)
        assert apart.median() < 0.1, model


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
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"

    def add(tensors):
        tensors[name.format(8)] = tensors[name.format(0)].clone()

    directory = changed(checkpoints["deepseek_v32", False], tmp_path, add)
    for rank in range(2):
        with pytest.raises(CheckpointError, match=rf"unexpected {name.format(8)}"):
            load_model(directory, mesh=Ranks(rank, 2), **OPTIONS)


def problem_of(directory, ranks):
    """What loading raises."""
    with pytest.raises((CheckpointError, ValueError)) as raised:
        load_model(directory, mesh=ranks, **OPTIONS)
    return str(raised.value)


def problems_of_one_rank(ranks, whole, broken, other):
    """What a rank hears of a second rank that misses a tensor, that has no room, whose weights are others, whose
    versions are, and whose GPU is."""
    told = {"missing": problem_of(broken, ranks)}
    told["weights"] = problem_of((whole, other)[ranks.rank], ranks)
    facts, first = loading._facts, torch.device("cuda", 0)
    full = torch.OutOfMemoryError("CUDA out of memory")
    room = [(loading, "load_weights", mock.Mock(side_effect=full))] if ranks.rank == 1 else []
    device = [
        (torch.cuda, "get_device_name", lambda _: ("NVIDIA H100", "NVIDIA H200")[ranks.rank]),
        (loading, "_facts", lambda checkpoint, precision, _: facts(checkpoint, precision, first)),
    ]
    dsa_version = [(dsa, "__version__", ("1.0", "1.1")[ranks.rank])]
    torch_version = [(torch, "__version__", ("2.11.0", "2.12.0")[ranks.rank])]
    for what, patches in {"room": room, "device": device, "dsa": dsa_version, "torch": torch_version}.items():
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            told[what] = problem_of(whole, ranks)
    return told


def test_what_is_wrong_with_one_rank_all_raise(checkpoints, tmp_path):
    """In the same words, or with the number of the rank that has the problem: all end alike, and nobody waits."""
    whole, name = checkpoints["deepseek_v32", False], "model.layers.1.mlp.experts.7.down_proj.weight"
    broken = changed(whole, tmp_path / "broken", lambda tensors: tensors.pop(name))
    # Names and shapes are the same: all that differs are numbers.
    write_tiny_checkpoint(tmp_path / "other", model="deepseek_v32", quantized=False, seed=7)
    first, second = in_ranks(2, problems_of_one_rank, whole, broken, tmp_path / "other")
    assert f"{name}: missing" in second["missing"] and first.pop("missing") == f"{second.pop('missing')} (rank 1)"
    assert second.pop("room") == "CUDA out of memory" and first.pop("room") == "CUDA out of memory (rank 1)"
    assert first == second
    same = "must be the same on all ranks, got"
    digests = r"one of digest \w{12} on rank 0 and one of digest \w{12} on rank 1"
    assert re.fullmatch(f"checkpoint: {same} {digests}", first.pop("weights"))
    assert first == {
        "dsa": f"dsa: {same} 1.0 on rank 0 and 1.1 on rank 1",
        "torch": f"torch: {same} 2.11.0 on rank 0 and 2.12.0 on rank 1",
        "device": f"device: {same} NVIDIA H100 on rank 0 and NVIDIA H200 on rank 1",
    }


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
    """Logits of a mesh, and of a dimension of one."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    square = init_device_mesh("cpu", (1, ranks.size), mesh_dim_names=("replicas", "heads"))
    with pytest.raises(ValueError, match=r"^mesh: must have one dimension, got 2; one of several is mesh\[its name\]"):
        load_model(directory, mesh=square, **OPTIONS)
    return [logits_of(load_model(directory, mesh=one, **OPTIONS)) for one in (mesh, square["heads"])]


def test_a_mesh(checkpoints):
    directory = checkpoints["deepseek_v32", False]
    whole, *_ = alone(directory)
    for found in in_ranks(2, of_mesh, directory):
        for logits in found:
            assert (logits - whole).abs().max() <= 2e-5 * whole.abs().max()
    with pytest.raises(TypeError, match=r"^mesh: must be a DeviceMesh, Ranks or None, got int"):
        load_model(directory, mesh=2, **OPTIONS)
    told = r"^trainable: a part of a model takes no gradient; accepted on one rank, got 2"
    with pytest.raises(ValueError, match=told):
        load_model(directory, mesh=Ranks(0, 2), trainable=True, **OPTIONS)


@pytest.mark.parametrize("tokens", [20, pytest.param(260, marks=pytest.mark.slow)])
def test_a_part_of_a_model_learns_nothing(checkpoints, tokens, monkeypatch):
    """Neither its indexers, whose losses would follow the attention of some heads, nor other parameters, whose
    gradients would end where ranks sum: with whole rows and with shared ones, also in a drafter."""
    for name in ("all_gather", "all_to_all"):
        monkeypatch.setattr(Ranks, name, lambda *arguments, **options: None)
    model = load_model(checkpoints["deepseek_v32", False], mesh=Ranks(0, 2), drafter=True, **OPTIONS)
    given = torch.tensor(TOKENS[:tokens]), SequenceBatch.without_cache([tokens])
    for stage in ("warmup", "sparse"):
        with pytest.raises(ValueError, match=r"^mesh: a part of a model trains no indexer"):
            IndexerStage(model, stage)
    drafter, layer = model.drafter, model.model.layers[1]
    for part in (model.lm_head, model.model.embed_tokens, layer.input_layernorm, layer.mlp.experts, drafter.norm):
        part.requires_grad_(True)
        with pytest.raises(ValueError, match=r"(a part of a model takes|a layer for inference has) no gradient"):
            drafter.logits(drafter(given[0], model.states(*given), given[1])) + model(*given)
        part.requires_grad_(False)
    drafter(given[0], model.states(*given), given[1])


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_part_s_shape_is_not_taken_for_the_whole(checkpoints, tmp_path, way):
    name = "model.layers.1.self_attn.q_b_proj.weight"

    def halve(tensors):
        tensors[name] = tensors[name][:384].contiguous()

    directory = changed(checkpoints["deepseek_v32", False], tmp_path, halve)
    expected = rf"{name}:? has shape \[384, 256\]; expected \[768, 256\]"
    with split_by(way), pytest.raises(CheckpointError, match=expected):
        load_model(directory, mesh=Ranks(1, 2), **OPTIONS)
