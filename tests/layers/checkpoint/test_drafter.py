"""Checkpoints whose multi-token-prediction layer is loaded: in which precision, what is shared, and what stops it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsa.testing import calc_diff
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint import SINGLE_NAME, Checkpoint, CheckpointError
from dsa_layers.checkpoint import loading as loading_module
from dsa_layers.checkpoint.export import save_fp8_checkpoint
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.families.registry import family, model_types
from dsa_layers.families.sparse_mla.drafted_states import DraftedStates
from dsa_layers.tiny import write_tiny_checkpoint

FAMILIES = [model for model in model_types() if family(model).drafter is not None]
PREFIX = {"deepseek_v32": "model.layers.4.", "glm_moe_dsa": "model.layers.5.", "deepseek_v4": "mtp.0."}
TOKENS = torch.arange(3, 304)
BATCH = SequenceBatch.without_cache([200, 100])


@pytest.fixture(scope="module", params=FAMILIES)
def model_type(request):
    return request.param


@pytest.fixture(scope="module")
def directory(model_type, tmp_path_factory):
    directory = tmp_path_factory.mktemp(model_type)
    write_tiny_checkpoint(directory, model=model_type)
    return directory


def load(directory, **options):
    return load_model(directory, drafter=True, progress=False, **options)


@torch.no_grad()
def draft(model, states=None):
    """(states of the target, those of the drafter)"""
    states = model.states(TOKENS[:-1], BATCH) if states is None else states
    return states, values(model.drafter(TOKENS[1:], states, BATCH))


def values(states):
    return states.values if isinstance(states, DraftedStates) else states


def test_it_is_loaded_when_it_is_asked_for(directory, capsys):
    note = "multi-token-prediction layer of the checkpoint is not used"
    model = load_model(directory)
    assert model.drafter is None and not [name for name in model.state_dict() if name.startswith("drafter.")]
    assert note in capsys.readouterr().err
    with_drafter = load_model(directory, drafter=True)
    assert note not in capsys.readouterr().err
    state, other = model.state_dict(), with_drafter.state_dict()
    assert state.keys() == {name for name in other if not name.startswith("drafter.")}
    assert all(torch.equal(other[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in state.items())
    with torch.no_grad():
        assert torch.equal(model(TOKENS, SequenceBatch.without_cache([301])),
                           with_drafter(TOKENS, SequenceBatch.without_cache([301])))  # fmt: skip


def test_its_tensors_are_the_checkpoint_s(directory, model_type):
    """All of them but the copies, of the values that are stored. The embedding and the head are the model's."""
    model = load(directory, dtype=torch.float32, dequantize=True)
    stored = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    copies = {name for name in stored if re.search(r"\.\d\.(embed_tokens|shared_head\.head)\.weight", name)}
    assert len(copies) == (2 if model_type == "deepseek_v32" else 0)
    state, read = model.state_dict(), set()
    for name, tensor in stored.items():
        if not name.startswith(PREFIX[model_type]):
            continue
        ours = model.name_of(name)
        if name in copies:
            assert model.skips(name) and torch.equal(state[ours], tensor.float())
        elif tensor.dtype in (torch.bfloat16, torch.float32) and not name.endswith(("_scale_inv", ".scale")):
            assert ours.startswith("drafter.") and torch.equal(state[ours], tensor.to(state[ours].dtype)), name
            read.add(ours)
    of_drafter = [name for name in state if name.startswith("drafter.")]
    norms = {"drafter.enorm.weight", "drafter.hnorm.weight", "drafter.norm.weight"}
    assert norms <= read and len(of_drafter) == len(model.drafter.state_dict())
    assert not [name for name in of_drafter if state[name].shape[0] == model.config.vocab_size]


def test_quantised_weights(directory, model_type):
    """FP8 and FP4 as they are stored, beside their dequantised selves: apart by the rounding of activations."""
    exact = load(directory, dtype=torch.float32, dequantize=True)
    states, expected = draft(exact)
    model = load(directory, dtype=torch.float32)
    dtypes = {tensor.dtype for name, tensor in model.state_dict().items() if name.startswith("drafter.")}
    assert torch.float8_e4m3fn in dtypes and (torch.int8 in dtypes) == (model_type == "deepseek_v4")
    assert exact.drafter.state_dict()["norm.weight"].dtype == torch.float32
    _, got = draft(model, states)
    assert 1e-6 < calc_diff(got, expected) < 0.02
    logits = [m.drafter.logits(s) for m, s in ((exact, expected), (model, got))]
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > 0.7
    # In bf16, for all of generation's passes: bytes in the cache, a prompt in two chunks, and a token.
    model = load(directory)
    states, expected = draft(model, states.bfloat16())
    cache, done = model.drafter.make_cache(2, 256, state_slots=1), 0
    assert {tensor.dtype for tensor in cache.tensors() if tensor.numel()} == {torch.uint8}
    for n in (120, 79, 1):
        rows = slice(done, done + n)
        paged = SequenceBatch.paged([n], [done + n], [[1]], 256, state_slots=[0])
        with torch.no_grad():
            got = values(model.drafter(TOKENS[1:][rows], states[rows], paged, cache))
        assert calc_diff(got.float(), expected[rows].float()) < 0.05
        done += n


def test_float_pages(directory):
    model = load(directory, kv_cache="model")
    assert torch.bfloat16 in {tensor.dtype for tensor in model.drafter.make_cache(2, 256).tensors()}
    model = load(directory, dtype=torch.float32, dequantize=True, kv_cache="fp8")
    assert torch.uint8 in {tensor.dtype for tensor in model.drafter.make_cache(2, 256).tensors()}


def test_a_cache_of_one_layer(directory):
    model = load(directory)
    cache, of_model = model.drafter.make_cache(5, state_slots=3), model.make_cache(5, state_slots=3)
    assert cache.page_size == of_model.page_size == model.drafter.page_size
    last = of_model.layer(0)
    for name in ("latent", "index", "window"):
        if hasattr(last, name):
            assert getattr(cache.layer(0), name).shape == getattr(last, name).shape
    assert sum(t.nbytes for t in vars(cache.layer(0)).values() if t is not None) == cache.nbytes
    with pytest.raises(IndexError):
        cache.layer(1)


def test_widened_experts(directory, model_type):
    """FP4 or FP8, with the same results."""
    kept, widened = load(directory), load(directory, widen_experts=True)
    blocks = [m.drafter.block.state_dict() for m in (kept, widened)]
    (first,), (second,) = [[t.dtype for n, t in block.items() if n.endswith("experts.down_proj")] for block in blocks]
    assert first == (torch.int8 if model_type == "deepseek_v4" else torch.float8_e4m3fn)
    assert second == torch.float8_e4m3fn
    states, got = draft(kept)
    assert torch.equal(got, draft(widened, states)[1])


def test_joint_products_have_the_layers_numbers(directory, monkeypatch):
    joined = load(directory)
    monkeypatch.setattr(loading_module.joint_linear, "join", lambda model: None)
    apart = load(directory)
    attention = [getattr(m.drafter.block, "attn", None) or m.drafter.block.self_attn for m in (joined, apart)]
    memory = [len({layer.weight.untyped_storage().data_ptr() for layer in of.joint_layers()[-2:]}) for of in attention]
    assert memory == [1, 2]
    states, got = draft(joined)
    assert torch.equal(got, draft(apart, states)[1])


def test_it_trains(directory):
    model = load(directory, dtype=torch.float32, dequantize=True, trainable=True)
    batch = SequenceBatch.without_cache([40])
    states = model.states(TOKENS[:40], batch)
    logits = model.drafter.logits(model.drafter(TOKENS[1:41], states, batch))
    torch.nn.functional.cross_entropy(logits, TOKENS[2:42]).backward()
    for name, parameter in model.drafter.named_parameters():
        learns = ".indexer." not in name and not name.endswith(("gate.e_score_correction_bias", "gate.bias"))
        assert (parameter.grad is not None and bool(parameter.grad.any())) is learns, name
    assert next(model.parameters()).grad.any()  # the embedding, by way of the states and of the tokens


def test_export(directory, tmp_path):
    """All tensors of the checkpoint again, without loss, and the copies with them."""
    model = load(directory, dtype=torch.float32, dequantize=True)
    save_fp8_checkpoint(model, tmp_path, json.loads((directory / "config.json").read_text()))
    before, after = Checkpoint(directory).tensors, Checkpoint(tmp_path).tensors
    assert {n: (info.dtype, info.shape) for n, info in before.items()} == {
        n: (info.dtype, info.shape) for n, info in after.items()
    }
    again = load(tmp_path, dtype=torch.float32, dequantize=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


# Copies that are changed.


def changed(directory, tmp_path, change, **fields):
    """The checkpoint with `change` made to a dictionary of all its tensors, and fields of config.json."""
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, tmp_path / SINGLE_NAME)
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    return tmp_path


def test_experts_in_one_tensor(directory, model_type, tmp_path):
    """As transformers' modules hold them."""
    experts = PREFIX[model_type] + ("ffn" if model_type == "deepseek_v4" else "mlp") + ".experts"
    names = ("w1", "w3", "w2") if model_type == "deepseek_v4" else ("gate_proj", "up_proj", "down_proj")
    stored_scale = "scale" if model_type == "deepseek_v4" else "weight_scale_inv"

    def fuse(tensors):
        for kind, suffix in (("weight", ""), (stored_scale, "_scale_inv")):
            parts = [[tensors.pop(f"{experts}.{e}.{name}.{kind}") for name in names] for e in range(8)]
            tensors[f"{experts}.gate_up_proj{suffix}"] = torch.stack(
                [torch.cat((gate.view(torch.uint8), up.view(torch.uint8))).view(gate.dtype) for gate, up, _ in parts]
            )
            tensors[f"{experts}.down_proj{suffix}"] = torch.stack([
                down.view(torch.uint8) for *_, down in parts
            ]).view(parts[0][2].dtype)  # fmt: skip

    got, expected = load(changed(directory, tmp_path, fuse)).state_dict(), load(directory).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name].view(torch.uint8), t.view(torch.uint8)) for name, t in expected.items())


def test_copies_are_not_read(directory, model_type, tmp_path):
    """What they hold has no effect: the layer shares the model's embedding and head."""
    head = {"deepseek_v4": ("emb.tok_emb.weight", "head.weight")}.get(
        model_type, ("embed_tokens.weight", "shared_head.head.weight")
    )

    def add(tensors):
        vocabulary, hidden = 2048, 512
        for name in head:
            tensors[PREFIX[model_type] + name] = torch.full((vocabulary, hidden), torch.nan, dtype=torch.bfloat16)

    _, expected = draft(load(directory))
    assert torch.equal(draft(load(changed(directory, tmp_path, add)))[1], expected)


def test_several_layers(directory, model_type, tmp_path):
    """The first is taken."""
    first = PREFIX[model_type]
    second = re.sub(r"\d", lambda digit: str(int(digit[0]) + 1), first)

    def repeat(tensors):
        for name in list(tensors):
            if name.startswith(first):
                tensors[name.replace(first, second, 1)] = torch.zeros_like(tensors[name].view(torch.uint8)).view(
                    tensors[name].dtype
                )

    fields = {"num_nextn_predict_layers": 2}
    if model_type == "deepseek_v4":
        fields["compress_ratios"] = [*json.loads((directory / "config.json").read_text())["compress_ratios"], 0]
    got = load(changed(directory, tmp_path, repeat, **fields)).state_dict()
    assert all(
        torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in load(directory).state_dict().items()
    )


def test_a_configuration_without_the_layer(directory, model_type, tmp_path):
    fields = {"num_nextn_predict_layers": 0}
    if model_type == "deepseek_v4":
        fields["compress_ratios"] = json.loads((directory / "config.json").read_text())["compress_ratios"][:-1]
    without = changed(directory, tmp_path, lambda tensors: drop(tensors, PREFIX[model_type]), **fields)
    message = f"^drafter: {re.escape(str(tmp_path))}/config.json has num_nextn_predict_layers=0; accepted: a checkpoint"
    with pytest.raises(ValueError, match=message):
        load(without)
    assert load_model(without, progress=False).drafter is None


def drop(tensors, prefix):
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


def test_files_without_the_layer(directory, model_type, tmp_path):
    without = changed(directory, tmp_path, lambda tensors: drop(tensors, PREFIX[model_type]))
    with pytest.raises(
        CheckpointError, match=r"drafter: holds no tensor of a multi-token-prediction layer; config\.json"
    ):
        load(without)
    assert load_model(without, progress=False).drafter is None


def test_files_with_a_part_of_the_layer(directory, model_type, tmp_path):
    without = changed(directory, tmp_path, lambda tensors: drop(tensors, PREFIX[model_type] + "enorm"))
    with pytest.raises(CheckpointError, match=r"1 problem, nothing was loaded:\n  drafter\.enorm\.weight: missing"):
        load(without)


def test_layers_of_another_shape(directory, model_type, tmp_path):
    """A layer of another kind has a tensor of its own, and one of other sizes has other sizes."""
    prefix = PREFIX[model_type]
    name = "e_proj" if model_type == "deepseek_v4" else "eh_proj"

    def change(tensors):
        tensors[f"{prefix}hnorm.weight"] = tensors[f"{prefix}hnorm.weight"][:256].clone()
        tensors[f"{prefix}{name}.bias"] = torch.zeros(512)

    with pytest.raises(CheckpointError) as error:
        load(changed(directory, tmp_path, change))
    text = str(error.value)
    assert "2 problems, nothing was loaded" in text
    assert f"drafter.hnorm.weight (stored as {prefix}hnorm.weight) has shape [256]; the model expects [512]" in text
    assert f"unexpected drafter.{name}.bias (stored as {prefix}{name}.bias)" in text


def test_deepseek_v4_with_entries_is_another_layer(tmp_path):
    """Of a drafter that compresses its keys the tensors would go unread."""
    write_tiny_checkpoint(tmp_path / "tiny", model="deepseek_v4")

    def add(tensors):
        tensors["mtp.0.attn.compressor.ape"] = torch.zeros(4, 1024)

    target = tmp_path / "changed"
    target.mkdir()
    with pytest.raises(CheckpointError, match=r"unexpected drafter\.block\.attn\.compressor\.ape \(stored as mtp\.0"):
        load(changed(tmp_path / "tiny", target, add))


def test_the_dspark_drafter(tmp_path):
    write_tiny_checkpoint(tmp_path / "tiny", model="deepseek_v4")

    def add(tensors):
        tensors["mtp.0.main_proj.weight"] = torch.zeros(4, 4)

    target = tmp_path / "changed"
    target.mkdir()
    with pytest.raises(
        CheckpointError, match=r"mtp\.0\.main_proj\.weight: belongs to the DSpark drafter, which is not"
    ):
        load(changed(tmp_path / "tiny", target, add))


def test_a_family_without_drafters(checkpoint, monkeypatch):
    without = family("deepseek_v32").__class__(**vars(family("deepseek_v32")) | {"drafter": None})
    monkeypatch.setattr(loading_module, "family", lambda model_type: without)
    with pytest.raises(ValueError, match=r"^drafter: is not supported for model type 'deepseek_v32'$"):
        load(checkpoint)


def test_no_flag(checkpoint):
    with pytest.raises(TypeError, match=r"^drafter: must be True or False, got 1"):
        load_model(checkpoint, drafter=1)
