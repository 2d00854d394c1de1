"""The references of multi-head attention over packed sequences and of selections' bits, against plain formulas."""

import math

import pytest
import torch

from dsa.reference.mla import mha_varlen_fwd as module
from dsa.reference.mla.mha_varlen_fwd import mha_varlen_fwd
from dsa.reference.mla.selection_bits import selected_keys, selection_bits
from tests.reference.common import assert_refused, i32
from tests.reference.mla.attention_oracle import assert_near, attend


def test_bits():
    starts = i32([0, 10, -3, 100, 2**31 - 5])
    indices = torch.randint(-5, 420, (5, 40), dtype=torch.int32)
    indices[4, :3] = i32([2**31 - 1, 2**31 - 5, 2**31 - 4])
    bits = selection_bits(indices, starts, 300)
    assert bits.shape == (5, 12) and bits.dtype == torch.int32
    for t, start in enumerate(starts.tolist()):
        expected = {i - start for i in indices[t].tolist() if i >= 0 and 0 <= i - start < 300}
        words = enumerate(bits[t].tolist())
        found = {w // 4 * 128 + n // 2 * 8 + w % 4 * 2 + n % 2 for w, word in words for n in range(32) if word >> n & 1}
        assert found == expected
        assert set(selected_keys(bits[t : t + 1], 310)[0].nonzero().flatten().tolist()) == expected


def test_bits_of_indices_that_count_from_the_first_key():
    indices = torch.randint(-5, 420, (5, 40), dtype=torch.int32)
    assert torch.equal(selection_bits(indices, None, 300), selection_bits(indices, i32([0] * 5), 300))


@pytest.mark.parametrize(("indices", "max_keys"), [((0, 3), 9), ((3, 0), 9), ((3, 2), 0)])
def test_bits_of_nothing(indices, max_keys):
    bits = selection_bits(torch.zeros(indices, dtype=torch.int32), i32([50] * indices[0]), max_keys)
    assert bits.shape == (indices[0], 4 * (max_keys > 0)) and not bits.any()


@pytest.mark.parametrize("chunk", [2**26, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("selecting", [True, False])
def test_sequences(selecting, causal, chunk, monkeypatch):
    """Prefixes, sequences without queries or keys, and with fewer keys than queries; queries of none."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    queries, keys = [4, 0, 5, 3, 2], [7, 1, 140, 2, 0]
    cu_q, cu_k = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (queries, keys))
    q, k, v = torch.randn(16, 4, 6), torch.randn(152, 2, 6), torch.randn(152, 2, 5)
    chosen = [sorted(torch.randperm(152)[:60].tolist()) for _ in range(16)]
    starts = [first for first, count in zip(cu_k, queries) for _ in range(count)] + [0, 0]
    selected = selection_bits(i32(chosen), i32(starts), 140) if selecting else None
    out, lse = mha_varlen_fwd(q, k, v, i32(cu_q), i32(cu_k), 140, 0.3, causal, selected=selected)
    for b in range(5):
        for i in range(queries[b]):
            t = cu_q[b] + i
            seen = range(cu_k[b], cu_k[b] + max(0, keys[b] - queries[b] + i + 1 if causal else keys[b]))
            visible = [j for j in seen if not selecting or j in chosen[t]]
            for h in range(4):
                # attend() takes a key's first channels for its value: v stands before k, and queries are 0 there
                keys_and_values = torch.cat((v, k), 2)[visible, h // 2]
                row, own, _ = attend(torch.cat((torch.zeros(5), q[t, h]))[None], keys_and_values, 0.3, 5)
                assert_near(out[t, h], row[0])
                assert_near(lse[h, t], own[0])
    assert not out[14:].any() and lse[:, 14:].eq(math.inf).all()


def test_rope_channels_apart_are_those_of_all_heads():
    q, k, v, rope = torch.randn(3, 4, 7), torch.randn(5, 2, 4), torch.randn(5, 2, 6), torch.randn(5, 3)
    bounds = i32([0, 3]), i32([0, 5]), 5, 0.7
    whole = torch.cat((k, rope[:, None].expand(-1, 2, -1)), -1)
    got, expected = mha_varlen_fwd(q, k, v, *bounds, k_rope=rope), mha_varlen_fwd(q, whole, v, *bounds)
    assert all(torch.equal(x, y) for x, y in zip(got, expected))


def test_bounds_outside_are_those_of_nothing():
    q, k = torch.randn(4, 1, 3), torch.randn(6, 1, 3)
    right, right_lse = mha_varlen_fwd(q, k, k, i32([0, 2, 4]), i32([0, 3, 6]), 6, 1.0)
    for wrong in (-1, -(2**31), 7, 2**31 - 1):
        for cu_q, cu_k in (([wrong, 2, 4], [0, 3, 6]), ([0, 2, 4], [wrong, 3, 6])):
            out, lse = mha_varlen_fwd(q, k, k, i32(cu_q), i32(cu_k), 6, 1.0)
            assert not out[:2].any() and lse[:, :2].eq(math.inf).all()
            assert torch.equal(out[2:], right[2:]) and torch.equal(lse[:, 2:], right_lse[:, 2:])
    out, lse = mha_varlen_fwd(q, k, k, i32([3, 1, 0]), i32([6, 2, 0]), 6, 1.0)
    assert not out.any() and lse.eq(math.inf).all()


def test_gradients_reach_queries_keys_and_values():
    q, k, v = (torch.randn(3, 2, 4, requires_grad=True) for _ in range(3))
    out, _ = mha_varlen_fwd(q, k, v, i32([0, 3]), i32([0, 3]), 3, 0.5)
    out.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (q, k, v))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(4, 3, 8)}, "q: heads must be a multiple of k's 2, at least as many, got 3"),
        ({"q": torch.zeros(4, 0, 8)}, "q: heads must be a multiple of k's 2, at least as many, got 0"),
        ({"softmax_scale": 0.0}, "softmax_scale: must be above 0, got 0.0"),
        ({"softmax_scale": math.inf}, "softmax_scale"),
        ({"selected": torch.zeros(4, 8).int()}, r"selected: must have a multiple of 4 words a query, at least 12 of "),
        ({"selected": torch.zeros(4, 13).int()}, r"max_seqlen_k=300 keys, got 13"),
        ({"selected": torch.zeros(3, 12).int()}, r"selected: shape must be \[4, words\], got \[3, 12\]"),
        ({"cu_seqlens_k": torch.zeros(3).int()}, "cu_seqlens_k: shape must be"),
        ({"dense_keys": -1}, "dense_keys: must be at least 0, got -1"),
        ({"v": torch.zeros(5, 2, 8)}, "v: shape must be"),
        ({"k": torch.zeros(6, 2, 7)}, "k: must have q's 8 channels, got 7 and no k_rope"),
        (
            {"k": torch.zeros(6, 2, 7), "k_rope": torch.zeros(6, 0)},
            "k: must have q's 8 channels, got 7 and 0 in k_rope",
        ),
        ({"k_rope": torch.zeros(6, 3)}, "k: must have q's 8 channels, got 8 and 3 in k_rope"),
        ({"k_rope": torch.zeros(5, 3)}, "k_rope: shape must be"),
    ],
)
def test_wrong_arguments(changed, message):
    given = {"q": torch.zeros(4, 4, 8), "k": torch.zeros(6, 2, 8), "v": torch.zeros(6, 2, 8)}
    given |= {"cu_seqlens_q": i32([0, 4]), "cu_seqlens_k": i32([0, 6]), "max_seqlen_k": 300, "softmax_scale": 1.0}
    assert_refused(message, mha_varlen_fwd, **given | changed)
