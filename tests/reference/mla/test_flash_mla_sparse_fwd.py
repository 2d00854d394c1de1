"""The reference of sparse prefill: dtypes, chunks of queries, overflow, NaN, gradients, and refused arguments."""

import math

import pytest
import torch

import dsa
from dsa.cases import CASES
from dsa.cases.attention import attend_lists, valid
from dsa.reference import flash_mla_sparse_fwd
from dsa.reference.mla import softmax_attention
from tests.reference.common import assert_refused, i32

CASE = next(case for case in CASES if case.name == "flash_mla_sparse_fwd")
INF, NAN = math.inf, math.nan
INDICES = i32(
    [
        [[0, 6, 3, 3, -1]],
        [[-1, -1, -1, -1, -1]],
        [[7, 2**31 - 1, -(2**31), 8, -9]],
        [[6, 5, 4, 3, 2]],
        [[7, 7, 1, -1, 1]],
    ]
)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("chunk", [2**24, 2 * 5 * 24])
@pytest.mark.parametrize(("dtype", "d", "d_v"), [(torch.float32, 24, 16), (torch.float16, 512, 512)])
def test_dtypes_are_right_however_many_queries_are_gathered_at_a_time(dtype, d, d_v, chunk, sink, counted, monkeypatch):
    monkeypatch.setattr(softmax_attention, "_CPU_CHUNK", chunk)
    kind = {"dtype": dtype, "d": d, "d_v": d_v, "sink": sink, "counted": counted}
    CASE.verify(tokens=5, heads=4, keys=7, top_k=5, invalid=0.3, **kind)


def test_large_logits_do_not_overflow():
    q, kv = torch.full((1, 1, 4), 100.0), torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 1, 4)
    for sink, expected in ((None, 2.0), (torch.tensor([800.0 - 50.0]), 2.0), (torch.tensor([1e6]), 0.0)):
        out, _, lse = flash_mla_sparse_fwd(q, kv, i32([[[0, 1]]]), 1.0, 4, sink)
        assert out[0, 0, 0].item() == pytest.approx(expected) and lse.item() == pytest.approx(800.0)


def test_nan_stays_with_the_queries_that_select_it():
    q, kv = torch.randn(5, 4, 24), torch.randn(9, 1, 24)
    clean, kv[[1, 7, 8]] = kv.clone(), NAN
    lengths = i32([5, 5, 0, 5, 0])
    got, expected = (flash_mla_sparse_fwd(q, x, INDICES, 0.7, 16, None, lengths) for x in (kv, clean))
    assert all(map(torch.equal, got, expected))
    out, _, _ = flash_mla_sparse_fwd(q, kv, INDICES, 0.7, 16)
    assert out[[0, 1, 3]].isfinite().all() and out[[2, 4]].isnan().all()


def test_empty_inputs():
    q, kv = torch.randn(5, 4, 24), torch.randn(7, 1, 24)
    out, max_logits, lse = flash_mla_sparse_fwd(q[:0], kv, INDICES[:0], 1.0, 16)
    assert out.shape == (0, 4, 16) and lse.shape == max_logits.shape == (0, 4)
    for keys, indices in ((kv[:0], INDICES), (kv, INDICES[:, :, :0])):
        out, max_logits, lse = flash_mla_sparse_fwd(q, keys, indices, 1.0, 16, torch.zeros(4))
        assert out.eq(0).all() and lse.eq(INF).all() and max_logits.eq(-INF).all() and out.shape == (5, 4, 16)


def test_gradients_are_those_of_the_formula():
    q, kv, upstream = torch.randn(5, 2, 8), torch.randn(7, 1, 8), torch.randn(5, 2, 6)

    def formula(q, kv):
        return attend_lists(q, kv[:, 0], valid(INDICES[:, 0], 7), 0.5, 6).out

    found = []
    for function, dtype in (
        (lambda *x: flash_mla_sparse_fwd(*x, INDICES, 0.5, 6)[0], torch.float32),
        (formula, torch.float64),
    ):
        inputs = [x.to(dtype).requires_grad_() for x in (q, kv)]
        found.append(torch.autograd.grad(function(*inputs), inputs, upstream.to(dtype)))
    for got, expected in zip(*found):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": torch.zeros(7, 24)}, r"kv: shape must be \[s_kv, 1, 24\], got \[7, 24\]"),
        ({"indices": INDICES[:, 0]}, r"indices: shape must be \[5, 1, K\], got \[5, 5\]"),
        ({"indices": INDICES.long()}, "indices: dtype must be int32, got int64"),
        ({"d_v": 512}, "d_v: must be at most d = 24, got 512"),
        ({"attn_sink": torch.zeros(4).bfloat16()}, "attn_sink: dtype must be float32, got bfloat16"),
        ({"topk_length": i32([1] * 4)}, r"topk_length: shape must be \[5\], got \[4\]"),
        ({"q": torch.zeros(5, 4, 24).double()}, "q: dtype must be float32, bfloat16 or float16, got float64"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    good = {"q": torch.zeros(5, 4, 24), "kv": torch.zeros(7, 1, 24), "indices": INDICES, "sm_scale": 1.0, "d_v": 16}
    assert_refused(message, dsa.flash_mla_sparse_fwd, **good | changes)
