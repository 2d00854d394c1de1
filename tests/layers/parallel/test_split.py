"""Models and drafters on several ranks: each rank has a part, and results agree with those of one process."""

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dsa_layers import Generator, Ranks, SamplingParams, SequenceBatch, load_model, read_config
from dsa_layers.engine.split import DoesNotDivide
from dsa_layers.errors import CheckpointError
from dsa_layers.models.registry import FAMILIES
from dsa_layers.training import IndexerStage
from tests.layers.generation.families import has_drafter
from tests.layers.io.stand_ins import changed, fuse_experts, write_changed_tiny
from tests.layers.layers.calls import use_multi_head_form
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import WAYS, split_by

OPTIONS = {"dtype": torch.float32, "dequantize": True, "drafter": True, "progress": False}
# The longest prompt and the longest of LENGTHS exceed index_topk (at most 128), so tokens select keys. LENGTHS and the
# first prefill chunk have 260 tokens each. Prefills of at least 256 tokens are sharded (SHARDED_TOKENS).
TOKENS, LENGTHS = [2 + i * i % 2000 for i in range(300)], [170, 90]
PROMPTS = [TOKENS, TOKENS[:3], TOKENS[7:20]]
FUSED = "experts in one tensor"
# A tiny model whose vocabulary and numbers of heads, experts and blocks of 128 channels are multiples of 3.
OF_THREE = "deepseek_v32 in thirds"
THIRDS = {
    "num_attention_heads": 6, "num_key_value_heads": 6, "n_routed_experts": 6, "vocab_size": 2304,
    "intermediate_size": 384, "moe_intermediate_size": 384, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# {number of ranks: [(model, quantised) of each checkpoint that is split over this number of ranks]}
SPLITS = {
    2: [(model, quantized) for model in FAMILIES for quantized in (True, False)] + [(FUSED, False)],
    3: [(OF_THREE, False)],
}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint, tmp_path_factory):
    """Return {(model, quantised): checkpoint's directory}. Tests must not change the directories."""
    made = {(model, quantized): tiny_checkpoint(model, quantized) for model, quantized in SPLITS[2] if model != FUSED}
    made[OF_THREE, False] = write_changed_tiny(tmp_path_factory.mktemp("thirds"), "deepseek_v32", False, **THIRDS)
    made[FUSED, False] = changed(made["deepseek_v32", False], tmp_path_factory.mktemp("fused"), fuse_experts)
    return made


@torch.inference_mode()
def logits_of(model):
    """Return the model's logits, followed by those of the drafter's first step if the model has a drafter."""
    batch, tokens = SequenceBatch.without_cache(LENGTHS), torch.tensor(TOKENS[:260])
    states = model.states(tokens, batch)
    if model.drafter is None:
        return model.logits(states)
    drafted = model.drafter(tokens.roll(-1), states, batch)
    return torch.cat((model.logits(states), model.drafter.logits(drafted)))


def outcome(directory, **options):
    """Return (logits, generated tokens, {weight: shape}). Decoding completes an entry of four tokens of deepseek_v4."""
    drafter = has_drafter(read_config(directory).model_type)
    model = load_model(directory, **OPTIONS | {"drafter": drafter} | options)
    generator = Generator(model, None, cache_tokens=2048, prefill_chunk=260, draft_tokens=2 * drafter)
    completions = generator.generate(PROMPTS, SamplingParams(max_tokens=5))
    weights = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return logits_of(model), [completion.tokens for completion in completions], weights


alone = functools.cache(outcome)  # the result of one process


def of_rank(ranks, directories, way, multi_head):
    with split_by(way), pytest.MonkeyPatch.context() as patch:
        if multi_head:
            use_multi_head_form(patch)
        return [outcome(directory, mesh=ranks) for directory in directories]


def elements(shapes):
    return sum(shape.numel() for shape in shapes.values())


@pytest.mark.parametrize(
    ("size", "way", "multi_head"),
    [
        (2, "queries", False),
        (3, "queries", False),
        pytest.param(2, "queries", True, marks=pytest.mark.slow),
        pytest.param(2, "heads", False, marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_process_does(checkpoints, size, way, multi_head):
    of_ranks = in_ranks(size, of_rank, [checkpoints[case] for case in SPLITS[size]], way, multi_head)
    for case, *found in zip(SPLITS[size], *of_ranks, strict=True):
        logits, tokens, whole = alone(checkpoints[case])
        for part_logits, part_tokens, parts in found:
            assert (part_logits - logits).abs().max() <= 2e-5 * logits.abs().max(), case
            assert torch.equal(part_logits, found[0][0]) and part_tokens == tokens, case
            assert parts.keys() == whole.keys() and elements(parts) == elements(found[0][2]), case
        # The ratio exceeds 1 / size: a rank has whole shared experts and, if split by queries, whole attention.
        assert elements(found[0][2]) / elements(whole) < {"queries": 0.8, "heads": 0.75}[way], case


@pytest.mark.parametrize(
    ("model", "quantized", "size", "what"),
    [
        ("deepseek_v32", True, 3, "3 do not evenly share the 4 attention heads of model.layers.0.self_attn"),
        ("deepseek_v32", True, 4, "4 do not evenly share the 6 blocks of 128 rows of .*q_b_proj"),
        ("glm_moe_dsa", True, 4, "4 do not evenly share the 14 blocks of 128 rows of .*kv_b_proj"),
        ("deepseek_v4", False, 4, "4 do not evenly share the 2 groups of attention heads of layers.0.attn"),
        ("deepseek_v4", False, 16, "16 do not evenly share the 8 attention heads"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused(checkpoints, model, quantized, size, what):
    with pytest.raises(DoesNotDivide, match=rf"^gpus: {what}"):
        load_model(checkpoints[model, quantized], mesh=Ranks(0, size), **OPTIONS)


def of_mesh(ranks, directory):
    mesh = init_device_mesh("cpu", (ranks.size,))
    square = init_device_mesh("cpu", (1, ranks.size), mesh_dim_names=("replicas", "heads"))
    with pytest.raises(ValueError, match=r"^mesh: must have one dimension, got 2; one of several is mesh\[its name\]"):
        load_model(directory, mesh=square, **OPTIONS)
    return [logits_of(load_model(directory, mesh=one, **OPTIONS)) for one in (mesh, square["heads"])]


def test_a_one_dimensional_mesh_splits_a_model(checkpoints):
    directory = checkpoints["deepseek_v32", False]
    whole, *_ = alone(directory)
    for found in in_ranks(2, of_mesh, directory):
        for logits in found:
            assert (logits - whole).abs().max() <= 2e-5 * whole.abs().max()


def test_wrong_meshes_and_training_of_a_part_are_refused(checkpoints):
    directory = checkpoints["deepseek_v32", False]
    with pytest.raises(TypeError, match=r"^mesh: must be a DeviceMesh, Ranks or None, got int"):
        load_model(directory, mesh=2, **OPTIONS)
    told = r"^trainable: a part of a model takes no gradient; accepted on one rank, got 2"
    with pytest.raises(ValueError, match=told):
        load_model(directory, mesh=Ranks(0, 2), trainable=True, **OPTIONS)
    model = load_model(directory, mesh=Ranks(0, 2), **OPTIONS)
    with pytest.raises(ValueError, match=r"^mesh: a part of a model trains no indexer"):
        IndexerStage(model, "warmup")
    model.model.embed_tokens.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^requires_grad: a part of a model takes no gradient"):
        model(torch.tensor(TOKENS[:260]), SequenceBatch.without_cache(LENGTHS))


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_part_s_shape_is_not_taken_for_the_whole(checkpoints, tmp_path, way):
    name = "model.layers.1.self_attn.q_b_proj.weight"

    def halve(tensors):
        tensors[name] = tensors[name][:384].contiguous()

    directory = changed(checkpoints["deepseek_v32", False], tmp_path, halve)
    expected = rf"{name}:? has shape \[384, 256\]; expected \[768, 256\]"
    with split_by(way), pytest.raises(CheckpointError, match=expected):
        load_model(directory, mesh=Ranks(1, 2), **OPTIONS)
