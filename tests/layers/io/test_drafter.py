"""Loading of a checkpoint's multi-token-prediction layer as a drafter: precisions, shared tensors and refusals."""

import re
from dataclasses import replace

import pytest
import torch

from dsa.testing import calc_diff
from dsa_layers import SequenceBatch, load_model
from dsa_layers.errors import CheckpointError
from dsa_layers.io import loading as loading_module
from dsa_layers.models.family import family
from tests.layers.generation.families import DRAFTED
from tests.layers.io.stand_ins import assert_same_tensors, changed, dropper, fields_of, read_tensors
from tests.layers.models.plain_drafters import drafter_prefix, values

TOKENS = torch.arange(3, 304)
BATCH = SequenceBatch.without_cache([200, 100])


@pytest.fixture(scope="module", params=DRAFTED)
def model_type(request):
    return request.param


def load(directory, **options):
    return load_model(directory, drafter=True, progress=False, **options)


@torch.no_grad()
def draft(model, states=None):
    """Return (states, the drafter's states for them). `model.states` computes `states` if they are not given."""
    states = model.states(TOKENS[:-1], BATCH) if states is None else states
    return states, values(model.drafter(TOKENS[1:], states, BATCH))


def test_the_drafter_is_loaded_only_if_it_is_asked_for(directory):
    model = load_model(directory)
    assert model.drafter is None
    with_drafter = load_model(directory, drafter=True)
    state = with_drafter.state_dict()
    assert_same_tensors({name: x for name, x in state.items() if not name.startswith("drafter.")}, model.state_dict())
    with torch.no_grad():
        assert torch.equal(*(one(TOKENS[:-1], BATCH) for one in (model, with_drafter)))


def test_the_drafter_has_the_stored_values_and_the_model_s_embedding_and_head(directory, model_type):
    model = load(directory, dtype=torch.float32, dequantize=True)
    stored = read_tensors(directory)
    copies = {name for name in stored if re.search(r"\.\d\.(embed_tokens|shared_head\.head)\.weight", name)}
    assert len(copies) == (2 if model_type == "deepseek_v32" else 0)
    state, read = model.state_dict(), set()
    for name, tensor in stored.items():
        if not name.startswith(drafter_prefix(directory)):
            continue
        ours = model.name_of(name)
        if name in copies:
            assert model.skips(name) and torch.equal(state[ours], tensor.float())
        elif tensor.dtype in (torch.bfloat16, torch.float32) and not name.endswith(("_scale_inv", ".scale")):
            assert ours.startswith("drafter.") and torch.equal(state[ours], tensor.to(state[ours].dtype)), name
            read.add(ours)
    of_drafter = [name for name in state if name.startswith("drafter.")]
    assert {"drafter.enorm.weight", "drafter.hnorm.weight", "drafter.norm.weight"} <= read
    own = {"drafter.embed_tokens.weight"} if model_type == "dots3_note" else set()
    as_wide = {name for name in of_drafter if state[name].shape[0] == model.config.vocab_size}
    assert {name for name in as_wide if "_proj" not in name} == own


def test_quantised_drafters_differ_from_dequantised_ones_by_rounding(directory, model_type):
    exact = load(directory, dtype=torch.float32, dequantize=True)
    states, expected = draft(exact)
    model = load(directory, dtype=torch.float32)
    dtypes = {tensor.dtype for tensor in model.drafter.state_dict().values()}
    assert torch.float8_e4m3fn in dtypes and (torch.int8 in dtypes) == (model_type == "deepseek_v4")
    assert exact.drafter.state_dict()["norm.weight"].dtype == torch.float32
    _, got = draft(model, states)
    assert 1e-6 < calc_diff(got, expected) < 0.02
    logits = [m.drafter.logits(s) for m, s in ((exact, expected), (model, got))]
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > 0.7
    # As in generation: bf16, an FP8 cache, a prompt in two chunks, and one more token.
    model = load(directory)
    states, expected = draft(model, states.bfloat16())
    cache, done = model.drafter.make_cache(2, 256, state_slots=1), 0
    # dots3-note's ring of keys has 16 bits, and so has GLM-5.3-Flash's ring of the indexer's inputs.
    stored = {"dots3_note": {torch.bfloat16}, "glm5_next": {torch.uint8, torch.bfloat16}}
    assert {tensor.dtype for tensor in cache.tensors() if tensor.numel()} == stored.get(model_type, {torch.uint8})
    for n in (120, 79, 1):
        rows = slice(done, done + n)
        paged = SequenceBatch.paged([n], [done + n], [[1]], 256, state_slots=[0])
        with torch.no_grad():
            got = values(model.drafter(TOKENS[1:][rows], states[rows], paged, cache))
        assert calc_diff(got.float(), expected[rows].float()) < 0.05
        done += n


def with_layers(directory, layers):
    """Return the fields of config.json to change for `layers` multi-token-prediction layers."""
    fields, found = fields_of(directory), {"num_nextn_predict_layers": layers}
    if "compress_ratios" in fields:
        found["compress_ratios"] = fields["compress_ratios"][: fields["num_hidden_layers"]] + [0] * layers
    return found


def test_the_first_of_several_layers_is_loaded(directory, tmp_path):
    first = drafter_prefix(directory)
    second = re.sub(r"\d", lambda digit: str(int(digit[0]) + 1), first)

    def repeat(tensors):
        tensors |= {
            name.replace(first, second, 1): torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
            for name, tensor in tensors.items()
            if name.startswith(first)
        }

    got = load(changed(directory, tmp_path, repeat, **with_layers(directory, 2)))
    assert_same_tensors(got.state_dict(), load(directory).state_dict())


def test_a_checkpoint_without_the_layer_has_no_drafter(directory, tmp_path):
    told = r"^drafter: config\.json must have num_nextn_predict_layers of at least 1, got 0"
    missing = r"drafter\..*: missing; expected"
    for fields, error, message in ((with_layers(directory, 0), ValueError, told), ({}, CheckpointError, missing)):
        changed(directory, tmp_path, dropper(drafter_prefix(directory)), **fields)
        with pytest.raises(error, match=message):
            load(tmp_path)
        assert load_model(tmp_path, progress=False).drafter is None


def of_another_kind(tensors):
    del tensors["mtp.0.enorm.weight"]
    tensors["mtp.0.hnorm.weight"] = tensors["mtp.0.hnorm.weight"][:256].clone()
    # A drafter does not compress keys.
    tensors["mtp.0.attn.compressor.ape"] = torch.zeros(4, 1024)
    tensors["mtp.0.main_proj.weight"] = torch.zeros(4, 4)


def test_layers_of_another_kind_are_refused(tiny_checkpoint, tmp_path):
    with pytest.raises(CheckpointError) as error:
        load(changed(tiny_checkpoint("deepseek_v4"), tmp_path, of_another_kind))
    for problem in (
        "4 problems, nothing was loaded",
        "drafter.enorm.weight: missing",
        "drafter.hnorm.weight (stored as mtp.0.hnorm.weight) has shape [256]; expected [512]",
        "unexpected drafter.block.attn.compressor.ape (stored as mtp.0",
        "mtp.0.main_proj.weight: belongs to the DSpark drafter, which is not",
    ):
        assert problem in str(error.value)


def test_a_drafter_of_a_family_without_one_is_refused(checkpoint, monkeypatch):
    draftless = replace(family("deepseek_v32"), drafter=None)
    monkeypatch.setattr(loading_module, "family", lambda model_type: draftless)
    with pytest.raises(ValueError, match=r"^drafter: is not supported for model type 'deepseek_v32'$"):
        load(checkpoint)
    with pytest.raises(TypeError, match=r"^drafter: must be True or False, got 1"):
        load_model(checkpoint, drafter=1)
