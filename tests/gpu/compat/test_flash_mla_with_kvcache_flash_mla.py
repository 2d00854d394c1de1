"""FlashMLA's signatures over the decoding kernels, at sizes of FlashMLA's own tests, on the GPU."""

import itertools

import pytest
import torch

import dsa
from dsa.compat import flash_mla
from tests.gpu.attention import D_V
from tests.gpu.mla import test_flash_mla_with_kvcache as dense
from tests.gpu.mla import test_flash_mla_with_kvcache_sparse as sparse
from tests.gpu.op_checks import assert_same_bits


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize(("h_q", "h_k"), [(1, 1), (9, 3), (63, 1), (64, 2), (128, 1), (128, 8)])
@pytest.mark.parametrize(("batch", "mean"), [(1, 20), (2, 140), (6, 4096), (64, 140)])
def test_dense_decoding(batch, mean, h_q, h_k, s_q, causal, record_error):
    """Of equal lengths, and of different ones of which some are zero."""
    some = itertools.cycle((mean, 0, 2 * mean - 1, mean // 3 + s_q))
    for lengths in ([mean] * batch, [next(some) for _ in range(batch)]):
        case = dense.Case(lengths, s_q, h_q, h_k)
        meta, num_splits = flash_mla.get_mla_metadata()
        arguments = (case.q, case.cache, case.table, case.lengths, D_V, meta, num_splits)
        for _ in range(2):
            got = flash_mla.flash_mla_with_kvcache(*arguments, causal=causal)
            case.check(record_error, got=got, causal=causal)


@pytest.mark.parametrize("use_legacy", [False, True])
@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("layout", ["656 bytes", "584 bytes"])
@pytest.mark.parametrize(("batch", "top_k", "extra"), [(2, 128, None), (74, 512, (128, 64)), (4, 2048, (592, 2))])
def test_sparse_decoding(batch, top_k, extra, layout, heads, s_q, use_legacy, record_error):
    case = sparse.Case(layout, batch, s_q, heads, top_k, rows=4096, extra=extra)
    lengths = torch.randint(0, top_k + 1, (batch,), dtype=torch.int32, device="cuda")
    sink = torch.randn(heads, device="cuda")
    sink[::3], sink[1::3] = torch.inf, -torch.inf
    more = (case.options.get("extra_k_cache"), case.options.get("extra_indices_in_kvcache"), lengths, None)
    meta, num_splits = flash_mla.get_mla_metadata()
    arguments = (case.q, case.cache, None, None, D_V, meta, num_splits, case.d**-0.5, False, True)
    whole = torch.full((batch, s_q, heads + 8, D_V), torch.nan, dtype=torch.bfloat16, device="cuda")
    for out in (None, whole[:, :, :heads]):
        got = flash_mla.flash_mla_with_kvcache(
            *arguments, case.options["indices"], sink, *more, out=out, use_legacy=use_legacy
        )
        assert got[1].transpose(1, 2).is_contiguous() and (out is None or got[0] is out)
        case.check(record_error, got=(got[0].contiguous(), got[1]), topk_length=lengths, attn_sink=sink)
    assert whole[:, :, heads:].isnan().all()


def test_plans_of_every_age():
    case = dense.Case([700, 64, 0, 9000], 2, 16)
    arguments = (case.q, case.cache, case.table, case.lengths, D_V)
    expected = dsa.flash_mla_with_kvcache(*arguments, None)
    old = flash_mla.get_mla_decoding_metadata(case.lengths, 32, 1, use_legacy=True)
    held = flash_mla.FlashMLASchedMeta(tile_scheduler_metadata=old[0], num_splits=old[1])
    for plan in (old, (held, None), flash_mla.get_mla_metadata(case.lengths, 32, 1), flash_mla.get_mla_metadata()):
        assert_same_bits(flash_mla.flash_mla_with_kvcache(*arguments, *plan, use_legacy=True), expected)
