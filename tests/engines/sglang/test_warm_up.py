"""`warm_up` calls every adapter that a model needs, with shapes that select every kernel that the model's batches can
use."""

import pytest
import torch

from dsa.kernels.indexer.topk_config import choose_config
from dsa.kernels.mla.mla_combine_sm90 import choose_config as choose_combine
from dsa.ops.mla import _sparse_attention
from dsa_engines.sglang import adapters, warm_up
from dsa_engines.sglang.layouts import Model

QUERIES = (*range(1, 600), *range(600, 8193, 97))  # the second range: prompts, which SGLang can run through decoding
SMS = (132, 114, 78)  # H100 SXM and H200 SXM, H100 PCIe, H20
V32 = Model(heads=8, query_dim=576, topk=16, index_heads=16, keys=300, next_n=3, fp8_cache=True)
V4 = Model(heads=8, query_dim=512, topk=16, index_heads=64, keys=300, next_n=2, fp8_cache=True)
V4_SIZES = ((4096, 512), (65_536, 512), (1_048_576, 1024))
CALLS = {
    "scores": {"fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"},
    "topk": {"topk"},
    "attention": {"sparse_prefill", "sparse_decode"},
}


def recording(name, adapter, made):
    def record(*given, **more):
        made.append((name, given))
        return adapter(*given, **more)

    return record


@pytest.fixture
def calls(monkeypatch):
    made = []
    for name in set().union(*CALLS.values()):
        monkeypatch.setattr(adapters, name, recording(name, getattr(adapters, name), made))
    monkeypatch.setattr(warm_up, "decoding_batches", lambda num_sms: [1, 3])
    return made


@pytest.mark.parametrize("model", [V32, V32._replace(fp8_cache=False), V4], ids=["fp8", "bf16", "v4"])
@pytest.mark.parametrize("ops", [["scores"], ["topk"], ["attention"]], ids="-".join)
def test_the_adapters_of_the_ops_are_called(calls, model, ops):
    warm_up.warm_up(model, frozenset(ops), "cpu")
    assert {name for name, _ in calls} == set().union(*(CALLS[op] for op in ops))
    assert torch.empty(0).device.type == "cpu" and torch.is_grad_enabled()


def test_draft_tokens_are_among_the_calls(calls):
    warm_up.warm_up(V32, frozenset({"scores"}), "cpu")
    queries = [given[0].shape[:3] for name, given in calls if name == "fp8_paged_mqa_logits"]
    assert queries == [(1, 1, 16), (1, 3, 16)]
    # SGLang pads an indexer with fewer than 32 heads to 32 for prefill.
    assert [given[0].shape for name, given in calls if name == "fp8_mqa_logits"] == [(1, 32, 128)]


def test_caches_are_those_of_the_model(calls):
    for model, widths in ((V32, [656] * 2), (V32._replace(fp8_cache=False), [576] * 2), (V4, [584] * 8)):
        calls.clear()
        warm_up.warm_up(model, frozenset({"attention"}), "cpu")
        assert [given[1].shape[-1] for name, given in calls if name == "sparse_decode"] == widths


@pytest.mark.parametrize(
    ("next_n", "heads", "expected"), [(1, 8, {8}), (2, 8, {8, 64}), (2, 64, {64}), (2, 128, {128})]
)
def test_the_draft_model_of_v4_pads_its_heads(calls, next_n, heads, expected):
    warm_up.warm_up(V4._replace(next_n=next_n, heads=heads), frozenset({"attention"}), "cpu")
    assert {given[0].shape[2] for name, given in calls if name == "sparse_decode"} == expected


def test_prompts_have_columns_for_all_sequences_of_a_batch(calls):
    """V3.2's scores have columns for all sequences of the batch. V4's have columns only for one sequence."""
    for model, most in ((V32, warm_up.MOST_COLUMNS), (V4, 512)):
        calls.clear()
        warm_up.warm_up(model, frozenset({"topk"}), "cpu")
        assert max(given[0].shape[1] for name, given in calls if name == "topk") == most


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("keys", [4000, 9000, 163_840, 1_048_576])
@pytest.mark.parametrize("k", [512, 2048])
def test_every_kernel_of_selection_is_compiled(sms, keys, k):
    def config(rows, columns):
        return choose_config(rows, (4 * columns + 15) // 16, k, 32, sms)

    compiled = {config(*shape) for shape in warm_up.topk_shapes(keys, sms)}
    most = -(-keys // 256) * 256
    shapes = [(rows, columns) for rows in range(1, 2 * sms) for columns in range(256, most + 1, max(256, most // 256))]
    assert {config(*shape) for shape in shapes} <= compiled


def decoding_kernels(queries, model, keys, sms, may_split=True):
    """Return {tile of heads}. If keys are split, the set has also the configuration of the kernel that combines the
    parts."""
    attention, tiles = _sparse_attention, -(-keys // _sparse_attention.TILE_N)
    if model.fp8_cache:
        head_tile = attention.fp8_kv_head_tile(queries, model.heads, tiles, sms, may_split)
    else:
        head_tile = next((tile for tile in attention.SWAP_AB_HEADS if model.heads <= tile), attention.TILE_M)
    workers, full_waves, split = attention.stream_k(queries, -(-model.heads // head_tile), tiles, sms, may_split)
    rest = queries - full_waves * workers
    return {head_tile} | ({choose_combine(split // rest + 1, rest * model.heads)} if split else set())


LARGE = {
    "fp8": V32._replace(topk=2048),
    "bf16": V32._replace(topk=2048, fp8_cache=False),
    **{f"v4, {keys}": V4._replace(keys=keys, topk=k) for keys, k in V4_SIZES},
}


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("heads", [4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("model", LARGE)
def test_every_kernel_of_decoding_is_compiled(sms, heads, model):
    """A query of V4 can attend to any number of keys from `window` to the largest number in `widths`."""
    model, window = LARGE[model]._replace(heads=heads), warm_up.V4_WINDOW
    widths = [window, *(window + n for n in warm_up.v4_widths(model))] if model.is_v4 else [model.topk]
    possible = range(window, max(widths) + 1, 64 * (1 + max(widths) // 2048)) if model.is_v4 else widths
    compiled = [decoding_kernels(n, model, width, sms) for n in warm_up.decoding_batches(sms) for width in widths]
    asked = [
        decoding_kernels(n, model, keys, sms, split) for n in QUERIES for keys in possible for split in (True, False)
    ]
    assert set().union(*asked) <= set().union(*compiled)
