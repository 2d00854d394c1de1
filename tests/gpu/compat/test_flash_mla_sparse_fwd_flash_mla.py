"""FlashMLA's signature over the sparse prefill kernel, at sizes of FlashMLA's own tests, on the GPU."""

import math

import pytest
import torch

import dsa
from dsa.compat import flash_mla
from tests.gpu.attention import case_of
from tests.gpu.op_checks import assert_same_bits

CASE = case_of("flash_mla_sparse_fwd")
# (keys, selected keys)
REGULAR = [(128, 128), (592, 128), (1592, 384), (1521, 512), (95, 128), (114, 384)]


def inputs(tokens, heads, keys, top_k, **options):
    sizes = {"tokens": tokens, "heads": heads, "keys": keys, "top_k": top_k, "scale": 0.05}
    return CASE.arguments("cuda", **{**sizes, "sink": False, "invalid": 0.0, **options})


def of_flash_mla(given):
    return flash_mla.flash_mla_sparse_fwd(
        *(given["q"], given["kv"], given["indices"]),
        sm_scale=given["sm_scale"],
        attn_sink=given["attn_sink"],
        topk_length=given["topk_length"],
    )


@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("s_q", [1, 62, 213])
@pytest.mark.parametrize(("s_kv", "top_k"), REGULAR)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("d", [512, 576])
def test_sparse_prefill(d, heads, s_kv, top_k, s_q, with_sink, with_length, record_error):
    invalid = 0.1 if top_k <= s_kv else 0.4
    given = inputs(s_q, heads, s_kv, top_k, d=d, invalid=invalid, counted=with_length)
    if with_sink:
        given["attn_sink"] = torch.randn(heads, device="cuda")
        given["attn_sink"][::3], given["attn_sink"][1::3] = math.inf, -math.inf
    record_error(CASE.check(given, of_flash_mla(given)))


@pytest.mark.parametrize(("s_q", "s_kv", "top_k"), [(1, 128, 128), (1234, 4321, 4096), (1024, 64, 8192)])
def test_rows_without_keys_are_empty(s_q, s_kv, top_k, record_error):
    given = inputs(s_q, 64, s_kv, top_k, d=512, sink=True)
    given["indices"][::2] = 2**31 - 1
    record_error(CASE.check(given, of_flash_mla(given)))


def test_statistics_as_the_older_build_has_them():
    q, kv, indices, *_ = inputs(33, 16, 3000, 320).values()
    indices[3] = -1
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, 0.5)
    whole = torch.empty(33, 64, 512, dtype=q.dtype, device="cuda")
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, out=whole[:, :16], use_legacy=True, return_log2_lse=True)
    assert_same_bits(got[0], out)
    assert got[0].data_ptr() == whole.data_ptr()
    torch.testing.assert_close(got[1], max_logits / math.log(2))
    torch.testing.assert_close(got[2], lse / math.log(2))
    assert flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, return_log2_lse=False)[1:] == (None, None)
