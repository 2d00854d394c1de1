import math

import pytest
import torch

from dsa.reference import flash_mla_sparse_fwd
from dsa.reference.mla import softmax_attention
from tests.reference.mla.attention_oracle import assert_near, attend_rows

INF, NAN = math.inf, math.nan


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


INDICES = i32(
    [
        [[0, 6, 3, 3, -1]],
        [[-1, -1, -1, -1, -1]],
        [[7, 2**31 - 1, -(2**31), 8, -9]],
        [[6, 5, 4, 3, 2]],
        [[7, 7, 1, -1, 1]],
    ]
)


def oracle(q, kv, indices, scale, d_v, sink=None, lengths=None):
    rows = []
    for t in range(len(q)):
        listed = indices[t, 0].tolist()[: None if lengths is None else max(0, lengths[t])]
        kept = [j for j in listed if 0 <= j < len(kv)]
        rows.append(kv[kept, 0])
    return attend_rows(q, rows, scale, d_v, sink)


@pytest.mark.parametrize("lengths", [None, [0, 5, 2, 3, 100], [-1, 0, 0, 1, 4]])
@pytest.mark.parametrize("with_sink", [False, True])
def test_against_float64(lengths, with_sink):
    q, kv = torch.randn(5, 4, 24), torch.randn(7, 1, 24)
    sink = torch.tensor([INF, -INF, 0.3, -2.0]) if with_sink else None
    out, max_logits, lse = flash_mla_sparse_fwd(
        q, kv, INDICES, 0.7, 16, sink, None if lengths is None else i32(lengths)
    )
    expected, expected_lse, expected_max = oracle(q, kv, INDICES, 0.7, 16, sink, lengths)
    assert out.shape == (5, 4, 16) and max_logits.shape == lse.shape == (5, 4)
    assert_near(out, expected)
    assert_near(lse, expected_lse)
    assert_near(max_logits, expected_max)
    for t in (1, 2):
        assert out[t].eq(0).all() and lse[t].eq(INF).all() and max_logits[t].eq(-INF).all()


@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 576), (torch.float16, 512)])
def test_dtypes_and_the_default_value_width(dtype, d):
    q, kv = torch.randn(5, 2, d).to(dtype), torch.randn(7, 1, d).to(dtype)
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, INDICES, d**-0.5)
    expected, expected_lse, expected_max = oracle(q, kv, INDICES, d**-0.5, 512)
    assert out.dtype == dtype and out.shape == (5, 2, 512)
    assert max_logits.dtype == lse.dtype == torch.float32
    assert_near(out, expected, 1e-2)
    assert_near(lse, expected_lse)
    assert_near(max_logits, expected_max)


def test_by_hand():
    # logits ln 1, ln 3 with values 0 and 8: out 6, lse ln 4, largest ln 3
    q, kv = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[8.0, 0.0]], [[0.0, 0.0]]])
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, i32([[[1, 0]]]), math.log(3) / 16, 1)
    assert out.item() == pytest.approx(6.0) and lse.item() == pytest.approx(math.log(4))
    assert max_logits.item() == pytest.approx(math.log(3))


def test_large_logits_do_not_overflow():
    q, kv = torch.full((1, 1, 4), 100.0), torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 4)
    for sink, expected in ((None, 2.0), (torch.tensor([800.0 - 50.0]), 2.0), (torch.tensor([1e6]), 0.0)):
        out, _, lse = flash_mla_sparse_fwd(q, kv, i32([[[0, 1]]]), 1.0, 4, sink)
        assert out[0, 0, 0].item() == pytest.approx(expected) and lse.item() == pytest.approx(800.0)


def test_nan_in_keys_that_are_not_selected():
    q, kv = torch.randn(5, 4, 24), torch.randn(9, 1, 24)
    kv[[1, 7, 8]] = NAN
    got = flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16, None, i32([5, 5, 0, 5, 0]))
    expected = oracle(q, kv, INDICES, 0.7, 16, None, [5, 5, 0, 5, 0])
    assert_near(got[0], expected[0])
    out, _, _ = flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16)
    assert out[[0, 1, 3]].isfinite().all() and out[[2, 4]].isnan().all()


def test_chunks_of_queries_change_nothing(monkeypatch):
    q, kv = torch.randn(5, 4, 24), torch.randn(7, 1, 24)
    whole = flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16)
    monkeypatch.setattr(softmax_attention, "_CPU_CHUNK", 2 * 5 * 24)
    torch.testing.assert_close(flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16), whole)


def test_empty_inputs():
    q, kv = torch.randn(5, 4, 24), torch.randn(7, 1, 24)
    out, max_logits, lse = flash_mla_sparse_fwd(q[:0], kv, INDICES[:0], 1.0, 16)
    assert out.shape == (0, 4, 16) and lse.shape == max_logits.shape == (0, 4)
    for keys, indices in ((kv[:0], INDICES), (kv, INDICES[:, :, :0])):
        out, max_logits, lse = flash_mla_sparse_fwd(q, keys, indices, 1.0, 16, torch.zeros(4))
        assert out.eq(0).all() and lse.eq(INF).all() and max_logits.eq(-INF).all() and out.shape == (5, 4, 16)


def test_gradients_flow_to_q_and_kv():
    q, kv = torch.randn(5, 2, 8).requires_grad_(), torch.randn(7, 1, 8).requires_grad_()
    indices = INDICES.clone()
    out, _, _ = flash_mla_sparse_fwd(q, kv, indices, 0.5, 6)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    q64, kv64 = q.detach().double().requires_grad_(), kv.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in range(5):
        kept = [j for j in indices[t, 0].tolist() if 0 <= j < 7]
        if kept:
            keys = kv64[kept, 0]
            total = total + ((q64[t] @ keys.T * 0.5).softmax(1) @ keys[:, :6] * upstream[t]).sum()
    total.backward()
    assert_near(q.grad, q64.grad)
    assert_near(kv.grad, kv64.grad)


def test_refuses_bad_arguments():
    q, kv = torch.randn(5, 4, 24), torch.randn(7, 1, 24)
    with pytest.raises(ValueError, match=r"kv: shape must be \[s_kv, 1, 24\], got \[7, 24\]"):
        flash_mla_sparse_fwd(q, kv[:, 0], INDICES, 1.0, 16)
    with pytest.raises(ValueError, match=r"indices: shape must be \[5, 1, K\], got \[5, 5\]"):
        flash_mla_sparse_fwd(q, kv, INDICES[:, 0], 1.0, 16)
    with pytest.raises(ValueError, match="indices: dtype must be int32, got int64"):
        flash_mla_sparse_fwd(q, kv, INDICES.long(), 1.0, 16)
    with pytest.raises(ValueError, match="d_v: must be at most d = 24, got 512"):
        flash_mla_sparse_fwd(q, kv, INDICES, 1.0)
    with pytest.raises(ValueError, match="attn_sink: dtype must be float32, got bfloat16"):
        flash_mla_sparse_fwd(q, kv, INDICES, 1.0, 16, torch.zeros(4).bfloat16())
    with pytest.raises(ValueError, match=r"topk_length: shape must be \[5\], got \[4\]"):
        flash_mla_sparse_fwd(q, kv, INDICES, 1.0, 16, None, i32([1] * 4))
    with pytest.raises(ValueError, match="q: dtype must be float32, bfloat16 or float16, got float64"):
        flash_mla_sparse_fwd(q.double(), kv, INDICES, 1.0, 16)
