"""Test `dsa.compat.flash_mla` on the CPU: smaller versions of FlashMLA's test cases, and the arguments and plans that
callers of different FlashMLA versions pass."""

import math

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.compat import flash_mla
from tests.reference.common import BF16, INF, assert_refused, assert_same_bits, i32

BY_NAME = {case.name: case for case in CASES}
PREFILL, DENSE = BY_NAME["flash_mla_sparse_fwd"], BY_NAME["flash_mla_with_kvcache dense"]
SPARSE, D_V = BY_NAME["flash_mla_with_kvcache v32"], 512
LAYOUTS = {576: "656 bytes", 512: "584 bytes"}
# The arguments of FlashMLA's flash_mla_with_kvcache, by position.
KVCACHE = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
KVCACHE += "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length"
SINK = torch.tensor([-INF, INF, 0.5, 1.0] * 16)


def kvcache(given, count=16, **options):
    return flash_mla.flash_mla_with_kvcache(*(given[name] for name in KVCACHE.split()[:count]), **options)


@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize(("s_q", "causal"), [(1, False), (2, True)])
@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("test_zero", [False, True])
def test_dense_decoding(h_q, s_q, causal, is_varlen, test_zero):
    """The cases of FlashMLA's `test_flash_mla_dense_decoding.py` with fewer keys."""
    lengths = [200, 7 if is_varlen else 200, 0 if test_zero else 200]
    given = DENSE.arguments(lengths=lengths, s_q=s_q, heads=h_q, causal=causal)
    given |= dict(zip(("tile_scheduler_metadata", "num_splits"), flash_mla.get_mla_metadata()))
    for _ in range(2):
        out, lse = kvcache(given, 7, causal=causal)
    DENSE.check(given, (out, lse))
    assert out.shape == (3, s_q, h_q, D_V) and lse.shape == (3, h_q, s_q) and lse.is_contiguous()


def sparse_inputs(d, **options):
    sizes = {"batch": 2, "s_q": 2, "heads": 64, "top_k": 40, "page": 16, "rows": 96, "invalid": 0.15}
    given = SPARSE.arguments(layout=LAYOUTS[d], **sizes, **options)
    return given | {"tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]}


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("extra", [None, (9, 8)])
@pytest.mark.parametrize("use_legacy", [False, True])
def test_sparse_decoding(d, sink, counted, extra, use_legacy):
    """The cases and parameter names of FlashMLA's `test_flash_mla_sparse_decoding.py`, with fewer keys."""
    given = sparse_inputs(d, extra=extra, counted=counted, scale=d**-0.55) | {"attn_sink": sink}
    out, lse = kvcache(given, use_legacy=use_legacy)
    assert lse.shape == (2, 64, 2) and lse.transpose(1, 2).is_contiguous()
    assert_same_bits((out, lse), dsa.flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": None}))


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("is_all_indices_invalid", [False, True])
def test_sparse_prefill(d, sink, counted, is_all_indices_invalid):
    """The cases and parameter names of FlashMLA's `test_flash_mla_sparse_prefill.py`, with fewer tokens."""
    sizes = {"tokens": 4, "keys": 50, "heads": 64, "top_k": 33, "invalid": 0.2}
    given = PREFILL.arguments(**sizes, d=d, counted=counted, scale=0.5) | {"attn_sink": sink}
    if is_all_indices_invalid:
        given["indices"][1:3] = -1
    positions = [given[name] for name in ("q", "kv", "indices", "sm_scale")]
    options = {"attn_sink": sink, "topk_length": given["topk_length"]}
    got = flash_mla.flash_mla_sparse_fwd(*positions, **options)
    PREFILL.check(given, got)
    log2 = flash_mla.flash_mla_sparse_fwd(*positions, D_V, *options.values(), return_log2_lse=True)
    torch.testing.assert_close(log2, (got[0], *(x / math.log(2) for x in got[1:])))
    options |= {"enable_batch_invariant": True, "indexer_topk": 0, "return_log2_lse": False}
    out, *rest = flash_mla.flash_mla_sparse_fwd(*positions, **options)
    assert torch.equal(out, got[0]) and rest == [None, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_batch_invariant": 1}, "enable_batch_invariant: must be True or False, got 1"),
        ({"indexer_topk": 64}, "indexer_topk: must be 0, got 64"),
    ],
)
def test_wrong_arguments_of_prefill_are_refused(changes, message):
    given = PREFILL.arguments()
    positions = [given[name] for name in ("q", "kv", "indices", "sm_scale")]
    assert_refused(message, flash_mla.flash_mla_sparse_fwd, *positions, **changes)


LENGTHS = i32([5, 60])


@pytest.mark.parametrize(
    ("arguments", "options"), [((), {}), ((LENGTHS, 8, 1), {}), ((), {"cache_seqlens": LENGTHS, "topk": 4})]
)
def test_metadata_of_any_version_is_a_new_object(arguments, options):
    assert flash_mla.get_mla_metadata(*arguments, **options) == (flash_mla.FlashMLASchedMeta(), None)


def test_decoding_takes_plans_of_any_version():
    plan = flash_mla.get_mla_decoding_metadata(LENGTHS, 8, 1, use_legacy=True)
    assert_same_bits(plan, dsa.get_mla_metadata(LENGTHS, 8, 1))
    given = DENSE.arguments(lengths=(5, 60), s_q=1, heads=8, page=16)
    expected = dsa.flash_mla_with_kvcache(**given)
    held = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=plan[0], num_splits=plan[1])
    for meta, splits in (plan, (held, None), flash_mla.get_mla_metadata(LENGTHS, 8, 1)):
        given |= {"tile_scheduler_metadata": meta, "num_splits": splits}
        assert_same_bits(kvcache(given, 7), expected)


def test_options_that_only_some_copies_have():
    given, whole = sparse_inputs(576), torch.zeros(2, 2, 70, D_V, dtype=BF16)
    indices = given["indices"]
    options = {"is_fp8_kvcache": True, "out": whole[:, :, :64], "enable_batch_invariant": True}
    out, lse = kvcache(given, 6, indices=indices, **options)
    assert_same_bits((out, lse), kvcache(given, 6, indices=indices))
    assert out.data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_format": "V32_NO_ROPE"}, "kv_format: must be None, got V32_NO_ROPE"),
        ({"descale_q": torch.zeros(1)}, "descale_q: must be None, got Tensor"),
        ({"use_legacy": 1}, "use_legacy: must be True or False, got 1"),
        ({"is_fp8_kvcache": False}, "k_cache: dtype must be float32"),
    ],
)
def test_wrong_arguments_of_decoding_are_refused(changes, message):
    given = sparse_inputs(576)
    assert_refused(message, kvcache, given, 6, indices=given["indices"], **changes)
