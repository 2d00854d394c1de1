import itertools
import math
import struct

import pytest
import torch

from dsa.reference import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from tests.reference.gemm import e4m3


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def poisoned_cache(pages, page_size, dim):
    return torch.full((pages, page_size, 1, dim + 4), 0x7F, dtype=torch.uint8)  # every e4m3 is NaN


def put(cache, page, offset, key_bytes, scale):
    page_size, dim = cache.shape[1], cache.shape[3] - 4
    raw = cache[page].view(-1)
    raw[offset * dim : (offset + 1) * dim] = torch.tensor(key_bytes, dtype=torch.uint8)
    at = page_size * dim + 4 * offset
    raw[at : at + 4] = torch.tensor(list(struct.pack("<f", scale)), dtype=torch.uint8)


class Case:
    """Sequences of random keys scattered over the pages of a cache whose other bytes are NaN."""

    def __init__(self, lengths, next_n, page_size, heads=3, dim=8, seed=0):
        g = torch.Generator().manual_seed(seed)
        table_width = max(1, -(-max([*lengths, 1]) // page_size)) + 1
        self.cache = poisoned_cache(len(lengths) * table_width + 1, page_size, dim)
        free = torch.randperm(len(self.cache), generator=g).tolist()
        self.table = torch.tensor([-1, 10**8, -(2**31)], dtype=torch.int32).repeat(len(lengths) * table_width)
        self.table = self.table[: len(lengths) * table_width].view(len(lengths), table_width).clone()
        self.keys = []
        for b, length in enumerate(lengths):
            keys = []
            for s in range(length):
                if s % page_size == 0:
                    self.table[b, s // page_size] = free.pop()
                key_bytes = torch.randint(0, 0x50, (dim,), generator=g) + 128 * torch.randint(0, 2, (dim,), generator=g)
                scale = struct.unpack("<f", struct.pack("<f", 0.3 + 0.1 * s))[0]
                put(self.cache, int(self.table[b, s // page_size]), s % page_size, key_bytes.tolist(), scale)
                keys.append(([e4m3.decode(x) for x in key_bytes.tolist()], scale))
            self.keys.append(keys)
        self.q = torch.randn(len(lengths), next_n, heads, dim, generator=g).to(torch.float8_e4m3fn)
        self.weights = torch.randn(len(lengths) * next_n, heads, generator=g)

    def oracle(self, visible, columns):
        batch, next_n, _, _ = self.q.shape
        out = torch.full((batch * next_n, columns), -math.inf, dtype=torch.float64)
        for b in range(batch):
            for i in range(next_n):
                for s in range(max(0, min(visible[b][i], columns))):
                    key, scale = self.keys[b][s]
                    total = 0.0
                    for h, w in enumerate(self.weights[b * next_n + i].tolist()):
                        total += w * max(0.0, sum(x * y for x, y in zip(self.q[b, i, h].float().tolist(), key)))
                    out[b * next_n + i, s] = scale * total
        return out


def assert_logits(got, expected):
    assert torch.equal(got == -math.inf, expected == -math.inf)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("per_row", [False, True])
def test_against_the_bytes(next_n, page_size, per_row):
    lengths = [17, 0, 1, 3, 33]
    case = Case(lengths, next_n, page_size)
    if per_row:
        # each row has its own length, in no order
        visible = [[max(0, n - (i * 7) % 5) for i in range(next_n)] for n in lengths]
        context_lens = i32(visible)
    else:
        visible = [[n - next_n + i + 1 for i in range(next_n)] for n in lengths]
        context_lens = i32(lengths)
    got = fp8_paged_mqa_logits(case.q, case.cache, case.weights, context_lens, case.table, None, 40)
    assert_logits(got, case.oracle(visible, 40))


def test_by_hand():
    cache = poisoned_cache(2, 2, 2)
    put(cache, 1, 0, [0x38, 0x40], 0.5)  # (1, 2)
    put(cache, 1, 1, [0xB8, 0x38], 3.0)  # (-1, 1)
    put(cache, 0, 0, [0x00, 0xC0], 0.1)  # (0, -2)
    q = torch.tensor([[[[1.0, 1.0], [-1.0, 0.0]]]]).to(torch.float8_e4m3fn)
    # head 0 dots: 3, 0, -2; head 1 dots: -1, 1, 0
    got = fp8_paged_mqa_logits(q, cache, torch.tensor([[2.0, -1.0]]), i32([3]), i32([[1, 0, -1]]), None, 5)
    torch.testing.assert_close(got, torch.tensor([[3.0, -3.0, 0.0, -math.inf, -math.inf]]))


def test_a_narrow_result_keeps_the_first_keys():
    case = Case([30, 4], 2, 8)
    got = fp8_paged_mqa_logits(case.q, case.cache, case.weights, i32([30, 4]), case.table, None, 6)
    assert got.shape == (4, 6)
    assert_logits(got, case.oracle([[29, 30], [3, 4]], 6))


def test_pages_that_do_not_exist_hold_no_keys():
    case = Case([20], 1, 8)
    case.table[0, 1] = -1
    for bad in (-1, len(case.cache), 2**31 - 1):
        case.table[0, 1] = bad
        got = fp8_paged_mqa_logits(case.q, case.cache, case.weights, i32([1000]), case.table[:, :3], None, 30)
        expected = case.oracle([[20]], 30)
        expected[0, 8:16] = -math.inf
        assert torch.equal(got[0, :20] == -math.inf, expected[0, :20] == -math.inf)
        torch.testing.assert_close(got[0, :20].double(), expected[0, :20], rtol=1e-5, atol=1e-4)
        assert got[0, 24:].eq(-math.inf).all()  # the length is longer than the table


def test_padded_pages_of_the_cache():
    case = Case([20, 9], 1, 8)
    wide = torch.full((len(case.cache), 8 * 12 + 40), 0x7F, dtype=torch.uint8)
    wide[:, : 8 * 12] = case.cache.view(len(case.cache), -1)
    strided = wide[:, : 8 * 12].unflatten(1, (8, 1, 12))
    args = (case.weights, i32([20, 9]), case.table, None, 20, True)
    assert torch.equal(fp8_paged_mqa_logits(case.q, strided, *args), fp8_paged_mqa_logits(case.q, case.cache, *args))


def test_strides_and_dtypes():
    case = Case([20], 1, 8)
    args = (case.q, case.cache, case.weights, i32([20]), case.table, None)
    assert fp8_paged_mqa_logits(*args, 257).stride() == (512, 1)
    half = fp8_paged_mqa_logits(*args, 257, logits_dtype=torch.bfloat16)
    assert half.stride() == (512, 1) and torch.equal(half, fp8_paged_mqa_logits(*args, 257).bfloat16())


def test_empty_batch_and_empty_cache():
    case = Case([20], 1, 8)
    none = fp8_paged_mqa_logits(case.q[:0], case.cache, case.weights[:0], i32([]), case.table[:0], None, 9)
    assert none.shape == (0, 9)
    got = fp8_paged_mqa_logits(case.q, case.cache[:0], case.weights, i32([20]), case.table, None, 9)
    assert got.shape == (1, 9) and got.eq(-math.inf).all()


def test_refuses_bad_arguments():
    case = Case([20], 2, 8)
    good = {
        "q": case.q,
        "kv_cache": case.cache,
        "weights": case.weights,
        "context_lens": i32([20]),
        "block_table": case.table,
        "schedule_meta": None,
        "max_context_len": 20,
    }
    fp8_paged_mqa_logits(**good)
    bad = [
        ("context_lens", i32([[20, 20, 20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 3\]"),
        ("context_lens", i32([[20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 1\]"),
        ("weights", case.weights[:1], r"weights: shape must be \[2, 3\], got \[1, 3\]"),
        ("kv_cache", case.cache[..., :11], r"kv_cache: shape must be \[pages, P, 1, 12\], got"),
        ("block_table", case.table.long(), "block_table: dtype must be int32, got int64"),
        ("max_context_len", 0, "max_context_len: must be at least 1, got 0"),
        ("schedule_meta", i32([0, 0]), r"schedule_meta: shape must be \[SMs \+ 1, 2\], got \[2\]"),
    ]
    for name, value, message in bad:
        with pytest.raises(ValueError, match=message):
            fp8_paged_mqa_logits(**{**good, name: value})


def test_plan_by_hand():
    # 600, 0 and 256 keys are 3, 0 and 1 splits; 3 SMs get 1, 1 and 2 of them
    plan = get_paged_mqa_logits_metadata(i32([600, 0, 256]), 64, 3)
    assert plan.dtype == torch.int32
    assert plan.tolist() == [[0, 0], [0, 1], [0, 2], [3, 0]]
    # the second sequence starts at its second split
    assert get_paged_mqa_logits_metadata(i32([256, 1024]), 64, 2).tolist() == [[0, 0], [1, 1], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([0, 0]), 64, 2).tolist() == [[2, 0], [2, 0], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([]), 64, 2).tolist() == [[0, 0], [0, 0], [0, 0]]


def test_plan_takes_the_longest_row():
    plan = get_paged_mqa_logits_metadata(i32([[600, 1], [0, 300]]), 32, 5)
    assert torch.equal(plan, get_paged_mqa_logits_metadata(i32([600, 300]), 32, 5))


@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
def test_plan_covers_all_work_once_and_evenly(num_sms):
    g = torch.Generator().manual_seed(num_sms)
    for batch in (1, 3, 40):
        lengths = torch.randint(0, 3000, (batch,), generator=g, dtype=torch.int32)
        lengths[torch.rand(batch, generator=g) < 0.3] = 0
        work = [(b, s) for b, n in enumerate(lengths.tolist()) for s in range(math.ceil(n / 256))]
        plan = [tuple(x) for x in get_paged_mqa_logits_metadata(lengths, 64, num_sms).tolist()]
        assert plan == sorted(plan) and plan[-1] == (batch, 0) and len(plan) == num_sms + 1
        shares = [[item for item in work if first <= item < end] for first, end in itertools.pairwise(plan)]
        assert list(itertools.chain(*shares)) == work
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1
        assert all(first in work for first, share in zip(plan, shares) if share)


def test_plan_refuses_bad_arguments():
    with pytest.raises(ValueError, match="block_kv: must be a divisor of 256, got 48"):
        get_paged_mqa_logits_metadata(i32([1]), 48, 1)
    with pytest.raises(ValueError, match="num_sms: must be at least 1, got 0"):
        get_paged_mqa_logits_metadata(i32([1]), 64, 0)
    with pytest.raises(TypeError, match=r"context_lens: must be a torch.Tensor, got list"):
        get_paged_mqa_logits_metadata([1], 64, 1)
