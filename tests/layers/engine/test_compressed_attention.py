"""DeepSeek-V4's attention: the keys of the tokens that a pass sees, and the rope of its outputs."""

import weakref

import pytest
import torch

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.compressed_kv_cache import CompressedLayerCache
from dsa_layers.evaluation.selections import latest_keys
from dsa_layers.layers import compressed_indexer, joint_linear, linear
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.rope import RopeAngles, RotaryEmbedding, rope_frequencies
from tests.layers.layers.calls import record

HIDDEN, DIM, WINDOW = 32, 512, 4
ROTARY = RotaryEmbedding(rope_frequencies(64, 1e4))


def make_layer(dtype=torch.bfloat16, compressor=None):
    sizes = {"dim": DIM, "window": WINDOW, "q_lora_rank": 16, "o_groups": 1, "o_lora_rank": 16, "dtype": dtype}
    layer = CompressedAttention(HIDDEN, 2, **sizes, compressor=compressor)
    torch.nn.init.normal_(layer.kv_norm.weight, 1, 0.2)
    return layer


def make_ring(storage):
    if storage == "fp8":
        return dsa.make_v4_cache(3, WINDOW).fill_(0xFF)
    return torch.full((3, WINDOW, 1, DIM), torch.nan, dtype=storage)


def as_stored(rows, storage):
    """What a cache gives back of these rows."""
    slots, pages = torch.arange(len(rows)), torch.zeros(1, len(rows), 1, DIM, dtype=rows.dtype)
    if storage == "fp8":
        pages = dsa.make_v4_cache(1, len(rows))
    dsa.write_kv_cache(rows, pages, slots)
    return dsa.read_kv_cache(pages, slots, dtype=rows.dtype)


# New tokens of two sequences, of which some have earlier ones: the first, the second, both.
PASSES = [[(7, 0), (3, 0)], [(2, 7), (3, 0)], [(3, 0), (2, 3)], [(2, 7), (6, 3)], [(5, 9)]]


@pytest.mark.parametrize("chunks", PASSES, ids=str)
@pytest.mark.parametrize("storage", ["fp8", torch.bfloat16], ids=str)
def test_keys_are_the_same_whichever_pass_wrote_them(chunks, storage):
    """Those of earlier passes are read from the ring, the new ones are not; a key is the same in either way."""
    torch.manual_seed(0)
    layer, rings = make_layer(), [2, 0][: len(chunks)]
    cache = CompressedLayerCache(make_ring(storage))
    projected = [torch.randn(new + earlier, DIM).bfloat16() for new, earlier in chunks]
    angles = [ROTARY(torch.arange(len(own))) for own in projected]
    with torch.no_grad():
        whole = SequenceBatch.without_cache([len(own) for own in projected])
        rope = [torch.cat(parts) for parts in zip(*angles)]
        expected = as_stored(layer._token_keys(torch.cat(projected), rope, whole, None), storage)
        expected = expected.split([len(own) for own in projected])
        for own, turn, ring, (_, earlier) in zip(projected, angles, rings, chunks):
            if earlier:
                batch = SequenceBatch.paged([earlier], [earlier], [[0]], 16, state_slots=[ring])
                layer._token_keys(own[:earlier], [part[:earlier] for part in turn], batch, cache)
        lens = [new for new, _ in chunks], [new + earlier for new, earlier in chunks]
        batch = SequenceBatch.paged(*lens, [[0], [1]][: len(chunks)], 16, state_slots=rings)
        new = [own[earlier:] for own, (_, earlier) in zip(projected, chunks)]
        rope = [torch.cat([x[e:] for x, (_, e) in zip(parts, chunks)]) for parts in zip(*angles)]
        got = layer._token_keys(torch.cat(new), rope, batch, cache)
        windows = batch.windows(WINDOW, WINDOW)
    seen = [own[max(earlier - WINDOW + 1, 0) :] for own, (_, earlier) in zip(expected, chunks)]
    assert torch.equal(got, torch.cat(seen))
    assert windows.cu_keys.tolist() == [0, *torch.tensor([len(own) for own in seen]).cumsum(0).tolist()]


@pytest.mark.parametrize("with_compressor", [False, True])
def test_a_pass_with_gradients_is_the_same_by_the_op_that_has_some(with_compressor, monkeypatch):
    """The ops of inference would lose the gradients on a GPU."""
    torch.manual_seed(0)
    asked = record(monkeypatch, "sparse_mla_attention", "sliding_window_attention", "window_sparse_attention")
    compressor = Compressor(HIDDEN, DIM, 2, overlap=False, dtype=torch.float32) if with_compressor else None
    layer, batch = make_layer(torch.float32, compressor), SequenceBatch.without_cache([9, 4])
    torch.nn.init.normal_(layer.attn_sink)
    rope, entry_rope = ROTARY(batch.positions), None
    if with_compressor:
        entry_rope = ROTARY(batch.entries(2).positions)
    x = torch.randn(13, HIDDEN)
    given = x.clone().requires_grad_()
    out = layer(given, rope, entry_rope, batch)
    out.square().sum().backward()
    assert given.grad.abs().sum() > 0 and layer.wkv.weight.grad.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(layer(x, rope, entry_rope, batch), out, rtol=1e-4, atol=1e-5)
    assert asked[0] == "sparse_mla_attention" and len(asked) == 2 and "window" in asked[1]


def indexed_layer(heads=2):
    layer = make_layer(torch.float32, Compressor(HIDDEN, DIM, 4, overlap=True))
    layer.indexer = CompressedIndexer(HIDDEN, 16, Compressor(HIDDEN, 128, 4, overlap=True), n_heads=heads, top_k=3)
    return layer


def surroundings(length):
    batch = SequenceBatch.without_cache([length])
    return ROTARY(batch.positions), ROTARY(batch.entries(4).positions), batch


@pytest.mark.parametrize(("length", "selects"), [(12, False), (40, True)])
@pytest.mark.parametrize("gradients", [False, True])
def test_index_keys_are_made_where_they_are_selected_from(length, selects, gradients, monkeypatch):
    layer = indexed_layer()
    projected = record(monkeypatch, "project", seen=lambda compressor, x: compressor, owner=Compressor)
    with torch.set_grad_enabled(gradients):
        layer(torch.randn(length, HIDDEN), *surroundings(length))
    assert (layer.indexer.compressor in projected) == selects and layer.compressor in projected


@pytest.fixture
def products(monkeypatch):
    """The numbers of columns of all products in fp32, and weak references to their results."""
    columns, results, product = [], [], joint_linear.linear_fp32

    def spy(x, weight, *scale, **options):
        y = product(x, weight, *scale, **options)
        columns.append(len(weight))
        results.append(weakref.ref(y.untyped_storage()))
        return y

    for module in (joint_linear, linear, compressed_indexer):
        monkeypatch.setattr(module, "linear_fp32", spy)
    return columns, results


@pytest.mark.parametrize(
    ("length", "heads", "apart", "joined"),
    [
        (12, 4, [4 * DIM], [4 * DIM]),  # nothing is selected: no index keys
        (40, 4, [4 * DIM, 512, 4], [4 * DIM + 516]),
        (40, 6, [4 * DIM, 512, 6], [4 * DIM + 512, 6]),  # rows would not lie at multiples of 16 bytes
    ],
)
def test_what_reads_x_in_fp32_is_one_product(length, heads, apart, joined, products):
    """Where weights lie side by side; else compressors have one each, and the indexer's weights are by themselves."""
    layer, x, given = indexed_layer(heads), torch.randn(length, HIDDEN), surroundings(length)

    @torch.no_grad()
    def run():
        products[0].clear()
        return layer(x, *given), list(products[0])

    for compressor in (layer.compressor, layer.indexer.compressor):
        joint_linear.join(compressor)
    expected, found = run()
    assert found == apart
    joint_linear.join(layer)
    out, found = run()
    assert found == joined
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    with latest_keys(layer):  # another way of selecting, which makes no weights
        assert run()[1] == apart[:1]
    hook = layer.indexer.compressor.wkv.register_forward_hook(lambda *_: None)
    assert run()[1][0] == apart[0]
    hook.remove()
    layer.compressor.__class__ = type("Other", (Compressor,), {"project": lambda self, x: Compressor.project(self, x)})
    assert run()[1] == apart


@pytest.mark.parametrize("joined", [False, True])
@torch.no_grad()
def test_what_entries_are_made_of_is_freed_before_attention(joined, products, monkeypatch):
    layer, prefill, seen = indexed_layer(4), CompressedAttention._prefill, []
    joint_linear.join(layer if joined else layer.compressor)
    if not joined:
        joint_linear.join(layer.indexer.compressor)

    def attended(*arguments):
        seen.extend(result() for result in products[1][: 1 if joined else 2])
        return prefill(*arguments)

    monkeypatch.setattr(CompressedAttention, "_prefill", attended)
    layer(torch.randn(40, HIDDEN), *surroundings(40))
    assert seen == ([None] if joined else [None, None])


@torch.no_grad()
def test_layers_of_a_pass_share_the_angles_back():
    """A plain pair is taken, too, with the same result."""
    layer, rope, _, batch = make_layer(), *surroundings(5)
    angles, x = RopeAngles(rope), torch.randn(5, HIDDEN).bfloat16()
    out, back = layer(x, angles, None, batch), angles.back
    assert torch.equal(layer(x, rope, None, batch), out)
    layer(x, angles, None, batch)
    assert angles.back is back


def fp8_layer(n_heads):
    sizes = {"dim": DIM, "window": WINDOW, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "fp8": True}
    layer = CompressedAttention(256, n_heads, **sizes)
    for name, parameter in layer.named_parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            parameter.data = torch.randn(parameter.shape).to(parameter.dtype)
        elif name.endswith("weight_scale_inv"):
            torch.nn.init.uniform_(parameter, 0.05, 0.1)
    return layer


@pytest.fixture
def casts(monkeypatch):
    """The groups of every attention that casts its results."""
    return record(monkeypatch, "window_attention_cast_to_fp8", seen=lambda *arguments, **_: arguments[9])


def test_results_are_cast_by_attention_where_nobody_else_sees_them(casts):
    """With the same numbers as where somebody does. With gradients the keys would be summed in another order."""
    layer, batch = fp8_layer(34).requires_grad_(False), SequenceBatch.without_cache([5, 3])
    rope, x, seen = RopeAngles(ROTARY(batch.positions)), torch.randn(8, 256).bfloat16(), []
    with torch.no_grad():
        expected = layer(x, rope, None, batch)
        assert casts == [2]
        hook = layer.wo_a.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
        assert torch.equal(layer(x, rope, None, batch), expected) and seen == [(8, 2, 17 * DIM)]
        hook.remove()
    assert torch.equal(layer(x, rope, None, batch), expected)
    assert casts == [2]


def test_results_of_few_heads_and_of_other_angles_are_cast_after_attention(casts):
    batch, x = SequenceBatch.without_cache([5]), torch.randn(5, 256).bfloat16()
    fewer = RotaryEmbedding(rope_frequencies(32, 1e4))
    with torch.no_grad():
        fp8_layer(32)(x, ROTARY(batch.positions), None, batch)
        fp8_layer(34)(x, fewer(batch.positions), None, batch)
        make_layer()(torch.randn(5, HIDDEN).bfloat16(), ROTARY(batch.positions), None, batch)
    assert not casts


@pytest.mark.parametrize(("channels", "joined"), [(64, True), (32, True), (36, False)])
def test_rope_is_one_with_its_neighbours_where_the_kernels_take_it(channels, joined, monkeypatch):
    """Of as many channels; others are turned by themselves."""
    batch, x = SequenceBatch.without_cache([5]), torch.randn(5, 256).bfloat16()
    rope = RotaryEmbedding(rope_frequencies(channels, 1e4))(batch.positions)
    called = record(monkeypatch, "rms_norm_rotary", "rotary_cast_to_fp8", "apply_rotary")
    with torch.no_grad():
        fp8_layer(32)(x, rope, None, batch)
    of_keys = ["apply_rotary"]
    assert sorted(called) == of_keys + (["rms_norm_rotary", "rotary_cast_to_fp8"] if joined else 2 * of_keys)
