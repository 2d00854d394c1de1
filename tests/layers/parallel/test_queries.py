"""Attention that long passes split by queries: its rows have one process's bits, and little is said for them."""

import contextlib
import copy
import functools
import itertools
import weakref
from operator import attrgetter
from unittest import mock

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.batch.rows import Rows
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine import paged_attention
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.evaluation.keys_read import KeysRead
from dsa_layers.evaluation.selections import latest_keys
from dsa_layers.families.deepseek_v4.model import DeepseekV4ForCausalLM
from dsa_layers.layers.linear import Linear
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.layers.selection import Selection
from dsa_layers.parallel.cuts import shares_of
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.rows import SharedRows, rows_of
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import split_by

# (new, earlier) tokens of two sequences, a pass; more than are selected. The first is short, and split by heads.
PASSES = [(130, 0), (20, 0)], [(150, 130), (110, 20)], [(1, 280), (257, 130)]
LONG = 1, 2
# Layers that are run, the first ones: each kind of them, and in GLM one that selects behind one that does not.
LAYERS = {"deepseek_v32": 2, "deepseek_v4": 3, "glm_moe_dsa": 4}
OPTIONS = {
    "fp32": {"dtype": torch.float32, "dequantize": True},
    "fp8": {"dtype": torch.bfloat16},
}


@pytest.fixture(
    scope="module",
    params=[("deepseek_v32", "deepseek_v4"), ("glm_moe_dsa",)],
    ids="-".join,
)
def checkpoints(request, tiny_checkpoint):
    return {model: tiny_checkpoint(model) for model in request.param}


def attentions(model):
    return [(name, layer) for name, layer, shares in shares_of(model) if shares.heads]


def test_a_rank_reads_all_heads_and_has_views_of_its_own(checkpoints):
    """Views are what it reads where it has its heads alone."""
    options = OPTIONS["fp8"]
    for model, directory in checkpoints.items():
        whole = dict(load_model(directory, progress=False, **options).state_dict())
        part = load_model(directory, mesh=Ranks(1, 2), progress=False, **options)
        with split_by("heads"):
            of_heads = dict(attentions(load_model(directory, mesh=Ranks(1, 2), progress=False, **options)))
        for name, layer in attentions(part):
            for key, tensor in layer.state_dict().items():
                assert torch.equal(tensor, whole[f"{name}.{key}"]), (model, name, key)
            own, expected = layer.own_part.of(layer), of_heads[name]
            assert own.n_heads == expected.n_heads == layer.n_heads // 2 and expected.own_part is own.own_part is None
            theirs, mine = expected.state_dict(), own.state_dict()
            assert mine.keys() == theirs.keys()
            for key, tensor in mine.items():
                assert torch.equal(tensor, theirs[key]), (model, name, key)
                whole_one = layer.state_dict()[key]
                assert whole_one.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr(), (model, name, key)
                assert tensor.stride() == whole_one.stride()
            assert not layer.own_part.copies(layer)


@pytest.mark.parametrize(("model", "name"), [("deepseek_v32", "o_proj"), ("deepseek_v4", "wo_a.matrices")])
def test_views_are_of_the_modules_that_are_there(tiny_checkpoint, model, name):
    """Of others with the same parameters, and not of those whose parts need not compute parts."""
    part = load_model(tiny_checkpoint(model), mesh=Ranks(1, 2), progress=False, **OPTIONS["fp32"])
    _, layer = attentions(part)[1]
    owner, _, attribute = name.rpartition(".")
    owner, whole = layer.get_submodule(owner), layer.get_submodule(name)
    layer.own_part.of(layer)

    class Doubled(Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    same = Linear(1, 1)
    same.weight, same.mark = whole.weight, "another"
    setattr(owner, attribute, same)
    assert layer.own_part.of(layer).get_submodule(name).mark == "another"
    other = Doubled(1, 1)
    other.weight = whole.weight
    setattr(owner, attribute, other)
    top = name.partition(".")[0]
    accepted = "accepted: Linear or BlockFP8Linear or GroupedLinear as they are, got Doubled"
    with pytest.raises(ValueError, match=f"^{top}: short passes compute parts of {type(layer).__name__}; {accepted}$"):
        layer.own_part.of(layer)
    part.load_state_dict(part.to("cpu").state_dict())  # which is no pass
    same.forward = other.forward
    setattr(owner, attribute, same)
    with pytest.raises(ValueError, match=f"^{top}: .*, got Linear, with a forward of its own$"):
        layer.own_part.of(layer)


def test_memory_is_held_once(tiny_checkpoint):
    """Copies of a layer have parts of their own weights, and weights that it leaves are freed."""
    part = load_model(tiny_checkpoint("deepseek_v32"), mesh=Ranks(1, 2), progress=False)
    _, layer = attentions(part)[1]
    other = copy.deepcopy(layer)
    assert not other.own_part._parts.modules
    mine, theirs = other.own_part.of(other), layer.own_part.of(layer)
    assert mine.n_heads == theirs.n_heads and torch.equal(mine.q_b_proj.weight, theirs.q_b_proj.weight)
    assert mine.q_b_proj.weight.untyped_storage().data_ptr() == other.q_b_proj.weight.untyped_storage().data_ptr()
    left = weakref.ref(theirs.q_b_proj.weight)
    layer.to("meta")
    del theirs, mine
    assert left() is None
    assert all(x.is_meta for x in layer.own_part.of(layer).parameters())


def test_weights_are_dequantised_once_for_all_heads_and_a_ranks_own(tiny_checkpoint):
    """Also after a change."""
    directory = tiny_checkpoint("deepseek_v32")
    part = load_model(directory, mesh=Ranks(1, 2), progress=False)
    with split_by("heads"):
        of_heads = load_model(directory, mesh=Ranks(1, 2), progress=False)
    (_, layer), (_, expected) = (attentions(model)[1] for model in (part, of_heads))
    for _ in range(2):
        whole = layer.kv_b_proj.float_weight(torch.bfloat16)
        assert layer.kv_b_proj.float_weight(torch.bfloat16) is whole
        own = layer.own_part.of(layer).kv_b_proj.float_weight(torch.bfloat16)
        assert torch.equal(own, expected.kv_b_proj.float_weight(torch.bfloat16))
        assert own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        for one in (layer, expected):
            one.kv_b_proj.weight_scale_inv.mul_(2)


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_choice_of_a_form_is_told_a_ranks_heads(tiny_checkpoint, multi_head, monkeypatch):
    """Also the number of ranks. The multi-head form uses a rank's part of the layer, the absorbed form all heads."""
    part = load_model(tiny_checkpoint("deepseek_v32"), mesh=Ranks(1, 2), progress=False)
    _, layer = attentions(part)[1]
    batch, told = SequenceBatch.without_cache([layer.indexer.top_k + 1]), []

    def is_faster(query_lens, key_lens, top_k, sizes, communication):
        told.append((sizes.heads, communication.processes))
        return multi_head

    class Shared(Rows):
        parts = shared = True

    monkeypatch.setattr(paged_attention, "multi_head_is_faster", is_faster)
    monkeypatch.setattr(PagedAttention, "_has_multi_head_kernel", lambda *_: True)
    monkeypatch.setattr(PagedAttention, "_pass", lambda one, x, *_, queries: (one.n_heads, queries.shared))
    x = torch.zeros(len(batch.positions), part.config.hidden_size)
    expected = (layer.n_heads // 2, False) if multi_head else (layer.n_heads, True)
    assert layer(x, *part.model.rotary(batch.positions), batch, rows=Shared()) == expected
    assert told == [(layer.n_heads // 2, 2)]


@pytest.mark.parametrize(("model", "name"), [("deepseek_v32", "kv_b_proj.weight"), ("deepseek_v4", "attn_sink")])
def test_a_pass_that_would_lose_gradients_is_refused(tiny_checkpoint, model, name):
    part = load_model(tiny_checkpoint(model), mesh=Ranks(1, 2), progress=False, **OPTIONS["fp32"])
    _, layer = attentions(part)[1]
    layer.get_parameter(name).requires_grad_()
    refused = f"^requires_grad: .* parts of {type(layer).__name__}, .*got True of {name.partition('.')[0]}$"
    with pytest.raises(ValueError, match=refused):
        layer.own_part.of(layer)
    with torch.no_grad():
        assert not attrgetter(name)(layer.own_part.of(layer)).requires_grad


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("model", "name"), [("deepseek_v32", "o_proj"), ("deepseek_v4", "wo_b")])
def test_columns_are_those_of_what_is_loaded(tiny_checkpoint, model, name, assign):
    """In the same memory, where a graph reads them, or where others take its place; also where they leave the
    device."""
    part = load_model(tiny_checkpoint(model), mesh=Ranks(1, 2), progress=False)
    _, layer = attentions(part)[1]
    before = [(x.data_ptr(), x.clone().float()) for x in layer.own_part.of(layer).get_submodule(name).parameters()]
    state = {key: x.clone() for key, x in part.state_dict().items()}
    for key, x in state.items():
        if key.endswith((f"{name}.weight", f"{name}.weight_scale_inv")):
            state[key] = (x.float() * torch.tensor([0.5, 2.0]).repeat_interleave(x.shape[1] // 2)).to(x.dtype)
    part.load_state_dict(state, assign=assign)
    own, whole = layer.own_part.of(layer).get_submodule(name), layer.get_submodule(name)
    for x, (address, old), of_all in zip(own.parameters(), before, whole.parameters(), strict=True):
        assert torch.equal(x.float(), of_all.chunk(2, 1)[1].float()) and not torch.equal(x.float(), old)
        assert x.untyped_storage().data_ptr() == of_all.untyped_storage().data_ptr()
        assert (x.data_ptr() == address) != assign
    layer.to("meta")
    assert all(x.is_meta for x in layer.own_part._parts.modules[name].parameters())


def attended(model, ranks):
    """({(pass, layer): what attention gives for this process's rows}, these rows' numbers in each pass)."""
    torch.manual_seed(0)
    size, dtype = model.page_size, model.precision.dtype
    cache = model.make_cache(20, size)
    pages, slots = [cache.allocator.allocate(10) for _ in range(2)], cache.state_slots.allocate(2)
    found, numbers = {}, []
    for i, lens in enumerate(PASSES):
        chunks = [Chunk(*of_one, own, slot) for of_one, own, slot in zip(lens, pages, slots)]
        batch = prefill_batch(chunks, size, "cpu")
        rows = rows_of(batch, ranks)
        x = torch.randn(len(batch.positions), model.config.hidden_size).to(dtype)
        numbers.append(rows.own(torch.arange(len(x))))
        for j, y in enumerate(attention(model, rows.own(x), batch, cache, rows)):
            found[i, j] = y
    return found, numbers


def counted(model, ranks, way):
    """The same, and the keys that tokens have read, where these are selected as ever, or are the latest."""
    with contextlib.nullcontext() if way == "selected" else latest_keys(model), KeysRead(model) as keys:
        return *attended(model, ranks), keys.counts()


def attention(model, x, batch, cache, rows):
    """Of layers, all of which read the same x."""
    count = LAYERS[model.config.model_type]
    if isinstance(model, DeepseekV4ForCausalLM):
        for i, layer in enumerate(model.layers[:count]):
            ratio = model.config.compress_rates.get(model.config.layer_types[i])
            rotary = model.rotaries["main" if ratio is None else "compress"]
            entry_rope = None if ratio is None else rotary(batch.entries(ratio).positions)
            yield layer.attn(x, RopeAngles(rotary(batch.positions)), entry_rope, batch, cache.layer(i), rows=rows)
        return
    selection = Selection()
    for i, layer in enumerate(model.model.layers[:count]):
        yield layer.self_attn(x, *model.model.rotary(batch.positions), batch, cache.layer(i), selection, rows=rows)


@contextlib.contextmanager
def told(said):
    """Appends (what is done, bytes of a row of all tensors) of all that is said of shared rows."""
    begin, add = SharedRows._begin_gather, SharedRows.sum

    def of_row(*own):
        return sum(x[:1].nbytes for x in own)

    def begin_gather(rows, own, *, at_once):
        said.append(("gather", of_row(*own)))
        return begin(rows, own, at_once=at_once)

    with (
        mock.patch.object(SharedRows, "_begin_gather", begin_gather),
        mock.patch.object(SharedRows, "sum", lambda rows, x: said.append(("sum", of_row(x))) or add(rows, x)),
    ):
        yield


@torch.inference_mode()
def of_ranks(ranks, directories):
    """By model and options: (what attention gives, rows' numbers, what is said), or the keys that were read."""
    found = {}
    for model, directory in directories.items():
        part, said = load_model(directory, mesh=ranks, progress=False, **OPTIONS["fp8"]), []
        with told(said):
            found[model, "fp8"] = *attended(part, ranks), said
        part = load_model(directory, mesh=ranks, progress=False, **OPTIONS["fp32"])
        found |= {(model, way): counted(part, ranks, way) for way in ("selected", "latest")}
        found[model, "fp32"] = found[model, "selected"]  # which is the same, and some seconds
    return found


@functools.cache
@torch.inference_mode()
def selected(directory):
    """`counted` in one process: two tests' expectation."""
    return counted(load_model(directory, progress=False, **OPTIONS["fp32"]), ALONE, "selected")


@pytest.fixture(scope="module")
def of_both(checkpoints):
    return in_ranks(2, of_ranks, checkpoints)


@pytest.mark.slow
@torch.inference_mode()
def test_rows_of_long_passes_have_the_bits_of_one_process(checkpoints, of_both):
    """And those of short ones its numbers."""
    for (model, directory), name in itertools.product(checkpoints.items(), OPTIONS):
        if name == "fp32":
            expected, *_ = selected(directory)
        else:
            expected, _ = attended(load_model(directory, progress=False, **OPTIONS[name]), ALONE)
        tolerance = {"fp32": 1e-6, "fp8": 0.01}[name]
        for found, numbers, _ in (of_one[model, name] for of_one in of_both):
            assert found.keys() == expected.keys()
            for (i, j), y in found.items():
                rows = expected[i, j][numbers[i]]
                assert len(rows) == sum(new for new, _ in PASSES[i]) // (2 if i in LONG else 1)
                if i in LONG:
                    assert torch.equal(y, rows), (model, name, i, j)
                else:
                    assert (y - rows).abs().max() < tolerance * rows.abs().max(), (model, name, i, j)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("way", ["selected", "latest"])
def test_keys_are_counted_and_may_be_others(checkpoints, of_both, way):
    """All tokens' on every rank. Another way of selecting gives the rows of all tokens."""
    for model, directory in checkpoints.items():
        if way == "selected":
            expected, _, counts = selected(directory)
        else:
            expected, _, counts = counted(load_model(directory, progress=False, **OPTIONS["fp32"]), ALONE, way)
        for found, numbers, theirs in (of_one[model, way] for of_one in of_both):
            assert theirs == counts, model
            for i, j in (key for key in found if key[0] in LONG):
                assert torch.equal(found[i, j], expected[i, j][numbers[i]]), (model, i, j)


@pytest.mark.slow
def test_keys_alone_are_said(of_both):
    """Neither queries, nor picks, nor results: latents and index keys in 16 bits; in V4 latents, and of layers with
    entries what these are made of, in 32; of a layer at once."""
    latent, index = (512 + 64) * 2, 128 * 2
    per_layer = {
        "deepseek_v32": [[latent + index]] * 2,
        "glm_moe_dsa": [[latent + index] if full else [latent] for full in (True, True, False, True)],
        "deepseek_v4": [[1024], [1024, 2 * 4 * (1024 + 256)], [1024, 2 * 4 * 512]],
    }
    for of_one in of_both:
        for model in {model for model, _ in of_one}:
            *_, said = of_one[model, "fp8"]
            assert said == [("gather", sum(sizes)) for sizes in per_layer[model]] * len(LONG), model


@torch.inference_mode()
def of_forms(ranks, directory):
    """By options, way of selecting and form: (what is said, the `Communication` that each layer counts)."""
    found = {}
    for name, way in itertools.product(OPTIONS, ("selected", "latest")):
        part = load_model(directory, mesh=ranks, progress=False, **OPTIONS[name])
        for multi_head in (False, True):
            said, counted = found[name, way, multi_head] = [], []

            def choose(*call, form=multi_head, counted=counted):
                counted.append(call[-1])
                return form

            with (
                contextlib.nullcontext() if way == "selected" else latest_keys(part),
                mock.patch.object(PagedAttention, "_has_multi_head_kernel", lambda *_: True),
                mock.patch.object(paged_attention, "multi_head_is_faster", choose),
                told(said),
            ):
                attended(part, ranks)
    return found


@pytest.mark.slow
def test_the_choice_of_a_form_counts_the_bytes_that_the_forms_say(tiny_checkpoint):
    """What the multi-head form says beyond the absorbed one, to the byte: in long passes; in short ones nothing."""
    for found in in_ranks(2, of_forms, tiny_checkpoint("deepseek_v32")):
        for name, way in itertools.product(OPTIONS, ("selected", "latest")):
            (absorbed, counted), (multi_head, also) = (found[name, way, form] for form in (False, True))
            assert counted == also
            short = [i not in LONG for i in range(len(PASSES)) for _ in range(LAYERS["deepseek_v32"])]
            assert [one is None for one in counted] == short
            counted = [one for one in counted if one is not None]
            more = sum(size for _, size in multi_head) - sum(size for _, size in absorbed)
            assert more == sum(one.token_bytes for one in counted), (name, way)
            assert len(multi_head) - len(absorbed) == sum(one.collectives for one in counted), (name, way)
            assert {one.collectives for one in counted} == {3 if way == "selected" else 2}
