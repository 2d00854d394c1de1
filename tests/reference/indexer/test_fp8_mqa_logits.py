import math

import pytest
import torch

from dsa.reference import fp8_mqa_logits, mqa_logits
from dsa.reference.indexer import fp8_mqa_logits as indexer_logits


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def operands(seq, keys, heads, dim, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(seq, heads, dim, generator=g).to(torch.float8_e4m3fn)
    k = torch.randn(keys, dim, generator=g).to(torch.float8_e4m3fn)
    k_scale = torch.rand(keys, generator=g) + 0.3
    weights = torch.randn(seq, heads, generator=g)
    return q, k, k_scale, weights


def oracle(q, k, k_scale, weights, ks, ke):
    out = torch.full((len(q), len(k)), -math.inf, dtype=torch.float64)
    q, k = q.double(), k.double()
    for t in range(len(q)):
        for s in range(max(0, int(ks[t])), min(int(ke[t]), len(k))):
            relu = [max(0.0, float(torch.dot(head, k[s]))) for head in q[t]]
            total = sum(float(w) * r for w, r in zip(weights[t], relu))
            out[t, s] = total * (1.0 if k_scale is None else float(k_scale[s]))
    return out


def assert_logits(got, expected, tolerance=1e-5):
    assert torch.equal(got == -math.inf, expected == -math.inf)
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 10)


RANGES = [(0, 37), (5, 6), (9, 9), (20, 3), (36, 37), (30, 90), (40, 90), (37, 37), (0, 0), (12, 30)]


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (4, 128), (32, 32)])
@pytest.mark.parametrize("clean", [True, False])
def test_against_float64_with_empty_unordered_and_overlong_ranges(heads, dim, clean):
    q, k, k_scale, weights = operands(len(RANGES), 37, heads, dim)
    ks, ke = i32(*[r[0] for r in RANGES]), i32(*[r[1] for r in RANGES])
    expected = oracle(q, k, k_scale, weights, ks, ke)
    assert_logits(fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, clean), expected)


def test_by_hand():
    q = torch.tensor([[[1.0, 0.0], [0.0, -2.0]]]).to(torch.float8_e4m3fn)
    k = torch.tensor([[3.0, 1.0], [4.0, -0.5], [-1.0, -3.0]]).to(torch.float8_e4m3fn)
    # head 0 dots: 3, 4, -1; head 1 dots: -2, 1, 6
    got = fp8_mqa_logits(q, (k, torch.tensor([0.1, 10.0, 3.0])), torch.tensor([[0.5, -2.0]]), i32(0), i32(3))
    torch.testing.assert_close(got, torch.tensor([[0.15, 0.0, -36.0]]))


def test_chunks_of_queries_change_nothing(monkeypatch):
    q, k, k_scale, weights = operands(11, 23, 3, 16)
    ks, ke = torch.arange(11, dtype=torch.int32), torch.arange(11, dtype=torch.int32) + 9
    for chunk in (1, 3 * 23 * 4):
        monkeypatch.setattr(indexer_logits, "_CHUNK", chunk)
        for compressed in (0, 9):
            expected = oracle(q, k, k_scale, weights, ks, ke)
            if compressed:
                expected = torch.stack([expected[t, t : t + 9] for t in range(11)])
            assert_logits(fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, max_seqlen_k=compressed), expected)


@pytest.mark.parametrize("width", [1, 10, 300])
def test_compressed_columns_start_at_the_row_start(width):
    q, k, k_scale, weights = operands(len(RANGES), 37, 4, 16)
    ks, ke = i32(*[r[0] for r in RANGES]), i32(*[r[1] for r in RANGES])
    full = oracle(q, k, k_scale, weights, ks, ke)
    expected = torch.full((len(RANGES), width), -math.inf, dtype=torch.float64)
    for t, (first, _) in enumerate(RANGES):
        for j in range(width):
            if first + j < 37:
                expected[t, j] = full[t, first + j]
    got = fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, False, width)
    assert got.shape == (len(RANGES), width)
    assert_logits(got, expected)


def test_row_stride_is_a_multiple_of_1024_bytes():
    q, k, k_scale, weights = operands(2, 300, 2, 16)
    args = (q, (k, k_scale), weights, i32(0, 0), i32(300, 300))
    # 300 + 256 = 556 columns, rounded up to 768 of 4 bytes or 1024 of 2
    assert fp8_mqa_logits(*args).stride() == (768, 1)
    assert fp8_mqa_logits(*args, logits_dtype=torch.bfloat16).stride() == (1024, 1)
    assert fp8_mqa_logits(*args, max_seqlen_k=257).stride() == (512, 1)
    assert fp8_mqa_logits(*args, max_seqlen_k=257, logits_dtype=torch.bfloat16).stride() == (512, 1)


def test_bf16_logits_are_the_rounded_fp32_ones():
    q, k, k_scale, weights = operands(5, 40, 8, 32)
    args = (q, (k, k_scale), weights, i32(0, 1, 2, 3, 4), i32(40, 30, 20, 10, 4))
    got = fp8_mqa_logits(*args, logits_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16 and torch.equal(got, fp8_mqa_logits(*args).bfloat16())


def test_nan_keys_reach_only_their_column():
    q, k, k_scale, weights = operands(2, 8, 4, 16)
    clean = fp8_mqa_logits(q, (k, k_scale), weights, i32(0, 4), i32(8, 8))
    k.view(torch.uint8)[2] = 0x7F
    k_scale[3] = math.nan
    got = fp8_mqa_logits(q, (k, k_scale), weights, i32(0, 4), i32(8, 8))
    assert got[0, 2:4].isnan().all() and got[1, :4].eq(-math.inf).all()
    keep = [0, 1, 4, 5, 6, 7]
    assert torch.equal(got[:, keep], clean[:, keep])


def test_no_queries_and_no_keys():
    q, k, k_scale, weights = operands(3, 5, 4, 16)
    assert fp8_mqa_logits(q[:0], (k, k_scale), weights[:0], i32(), i32()).shape == (0, 5)
    assert fp8_mqa_logits(q, (k[:0], k_scale[:0]), weights, i32(0, 0, 0), i32(1, 0, 5)).shape == (3, 0)
    got = fp8_mqa_logits(q, (k[:0], k_scale[:0]), weights, i32(0, 0, 0), i32(1, 0, 5), max_seqlen_k=4)
    assert got.eq(-math.inf).all() and got.shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_unquantised_form(dtype):
    g = torch.Generator().manual_seed(1)
    q = torch.randn(len(RANGES), 4, 24, generator=g).to(dtype)
    k, weights = torch.randn(37, 24, generator=g).to(dtype), torch.randn(len(RANGES), 4, generator=g)
    ks, ke = i32(*[r[0] for r in RANGES]), i32(*[r[1] for r in RANGES])
    got = mqa_logits(q, k, weights, ks, ke)
    assert got.dtype == torch.float32
    assert_logits(got, oracle(q, k, None, weights, ks, ke))


def test_gradients_of_the_unquantised_form():
    g = torch.Generator().manual_seed(2)
    q, k, w = (torch.randn(*shape, generator=g) for shape in ((3, 2, 4), (5, 4), (3, 2)))
    ks, ke, upstream = i32(0, 1, 4), i32(5, 3, 4), torch.randn(3, 5, generator=g)
    inputs = [x.clone().requires_grad_() for x in (q, k, w)]
    logits = mqa_logits(*inputs, ks, ke)
    logits.backward(torch.where(logits == -math.inf, 0.0, upstream))
    dq, dk, dw = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, w))
    for t in range(3):
        for s in range(int(ks[t]), int(ke[t])):
            for h in range(2):
                dot = float(q[t, h].double() @ k[s].double())
                if dot > 0:
                    d = float(upstream[t, s])
                    dw[t, h] += d * dot
                    dq[t, h] += d * float(w[t, h]) * k[s]
                    dk[s] += d * float(w[t, h]) * q[t, h]
    for x, expected in zip(inputs, (dq, dk, dw)):
        torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_refuses_bad_arguments():
    q, k, k_scale, weights = operands(2, 8, 4, 16)
    ks, ke = i32(0, 0), i32(8, 8)
    with pytest.raises(ValueError, match="q: dtype must be float8_e4m3fn, got float32"):
        fp8_mqa_logits(q.float(), (k, k_scale), weights, ks, ke)
    with pytest.raises(ValueError, match=r"kv\[1\]: shape must be \[8\], got \[7\]"):
        fp8_mqa_logits(q, (k, k_scale[:7]), weights, ks, ke)
    with pytest.raises(ValueError, match=r"weights: shape must be \[2, 4\], got \[2, 3\]"):
        fp8_mqa_logits(q, (k, k_scale), weights[:, :3], ks, ke)
    with pytest.raises(ValueError, match="cu_seq_len_k_end: dtype must be int32, got int64"):
        fp8_mqa_logits(q, (k, k_scale), weights, ks, ke.long())
    with pytest.raises(ValueError, match=r"max_seqlen_k: must be at least 0, got -1"):
        fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, False, -1)
    with pytest.raises(ValueError, match="logits_dtype: must be float32 or bfloat16"):
        fp8_mqa_logits(q, (k, k_scale), weights, ks, ke, logits_dtype=torch.float16)
    with pytest.raises(TypeError, match="kv: must be a pair"):
        fp8_mqa_logits(q, k, weights, ks, ke)
    with pytest.raises(ValueError, match=r"k: shape must be \[Skv, 16\], got \[8, 8\]"):
        mqa_logits(q.float(), k[:, :8].float(), weights, ks, ke)
