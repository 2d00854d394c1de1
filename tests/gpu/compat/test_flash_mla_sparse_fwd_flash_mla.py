"""FlashMLA's signature over the sparse prefill kernel, at sizes of FlashMLA's own tests, on the GPU."""

import math

import pytest
import torch

import dsa
from dsa.compat import flash_mla
from tests.gpu.attention import spoiled
from tests.gpu.mla import test_flash_mla_sparse_fwd as prefill
from tests.gpu.op_checks import assert_same_bits

# (keys, selected keys)
REGULAR = [(128, 128), (592, 128), (1592, 384), (1521, 512), (95, 128), (114, 384)]


@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("s_q", [1, 62, 213])
@pytest.mark.parametrize(("s_kv", "top_k"), REGULAR)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("d", [512, 576])
def test_sparse_prefill(d, heads, s_kv, top_k, s_q, with_sink, with_length, record_error):
    q, kv, indices = prefill.inputs(s_q, heads, s_kv, top_k, d)
    indices = spoiled(indices, s_kv, 0.1 if top_k <= s_kv else 0.4)
    options = {"attn_sink": None, "topk_length": None}
    if with_sink:
        options["attn_sink"] = torch.randn(heads, device="cuda")
        options["attn_sink"][::3], options["attn_sink"][1::3] = math.inf, -math.inf
    if with_length:
        options["topk_length"] = torch.randint(0, top_k + 1, (s_q,), dtype=torch.int32, device="cuda")
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale=0.5, **options)
    prefill.check(q, kv, indices, record_error, got=got, scale=0.5, **options)


@pytest.mark.parametrize(("s_q", "s_kv", "top_k"), [(1, 128, 128), (1234, 4321, 4096), (1024, 64, 8192)])
def test_rows_without_keys(s_q, s_kv, top_k, record_error):
    q, kv, indices = prefill.inputs(s_q, 64, s_kv, top_k, 512)
    indices[::2] = 2**31 - 1
    sink = torch.randn(64, device="cuda")
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, attn_sink=sink)
    prefill.check(q, kv, indices, record_error, got=got, scale=0.5, attn_sink=sink)


def test_statistics_as_the_older_build_has_them():
    q, kv, indices = prefill.inputs(33, 16, 3000, 320)
    indices[3] = -1
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, 0.5)
    whole = torch.empty(33, 64, 512, dtype=q.dtype, device="cuda")
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, out=whole[:, :16], use_legacy=True, return_log2_lse=True)
    assert_same_bits(got[0], out)
    assert got[0].data_ptr() == whole.data_ptr()
    torch.testing.assert_close(got[1], max_logits / math.log(2))
    torch.testing.assert_close(got[2], lse / math.log(2))
    assert flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, return_log2_lse=False)[1:] == (None, None)
