import itertools
import math

import pytest
import torch

from dsa.reference import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata, write_indexer_cache
from tests.reference.common import assert_refused, i32


def poisoned_cache(pages, page_size, dim):
    return torch.full((pages, page_size, 1, dim + 4), 0x7F, dtype=torch.uint8)  # every e4m3 is NaN


class Case:
    """Sequences of random keys scattered over the pages of a cache whose other bytes are NaN."""

    def __init__(self, lengths, next_n, page_size, heads=3, dim=8):
        pages = max(1, -(-max(lengths) // page_size)) + 1
        self.cache = poisoned_cache(len(lengths) * pages + 1, page_size, dim)
        own = torch.randperm(len(self.cache))[: len(lengths) * pages].view(len(lengths), pages).int()
        used = torch.arange(pages) * page_size < i32(lengths)[:, None]
        garbage = i32([-1, 10**8, -(2**31)]).repeat(own.numel())[: own.numel()].view(own.shape)
        self.table = torch.where(used, own, garbage)
        self.keys = []  # [n, dim] of each sequence, scaled
        for b, length in enumerate(lengths):
            keys, scales = torch.randn(length, dim).to(torch.float8_e4m3fn), 0.3 + 0.1 * torch.arange(length)
            s = torch.arange(length)
            write_indexer_cache(keys, scales, self.cache, own[b, s // page_size].long() * page_size + s % page_size)
            self.keys.append(keys.double() * scales[:, None])
        self.q = torch.randn(len(lengths), next_n, heads, dim).to(torch.float8_e4m3fn)
        self.weights = torch.randn(len(lengths) * next_n, heads)

    def oracle(self, visible, columns):
        """Of the first `columns` keys; visible[b][i]: how many the query sees."""
        out = torch.full((len(self.weights), columns), -math.inf, dtype=torch.float64)
        queries = zip(self.q.flatten(0, 1), self.weights, [(b, n) for b, own in enumerate(visible) for n in own])
        for row, (q, weights, (b, n)) in enumerate(queries):
            n = max(0, min(n, columns))
            out[row, :n] = weights.double() @ (q.double() @ self.keys[b][:n].T).relu()
        return out


def assert_logits(got, expected):
    assert torch.equal(got == -math.inf, expected == -math.inf)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("columns", [40, 6])
@pytest.mark.parametrize("per_row", [False, True])
def test_against_float64(next_n, page_size, columns, per_row):
    lengths = [17, 0, 1, 3, 33]
    case = Case(lengths, next_n, page_size)
    if per_row:
        # each row has its own length, in no order
        visible = [[max(0, n - (i * 7) % 5) for i in range(next_n)] for n in lengths]
    else:
        visible = [[n - next_n + i + 1 for i in range(next_n)] for n in lengths]
    context_lens = i32(visible if per_row else lengths)
    got = fp8_paged_mqa_logits(case.q, case.cache, case.weights, context_lens, case.table, None, columns)
    assert_logits(got, case.oracle(visible, columns))


def test_pages_that_do_not_exist_hold_no_keys():
    case = Case([20], 1, 8)
    expected = case.oracle([[20]], 20)
    expected[0, 8:16] = -math.inf
    for bad in (-1, len(case.cache), 2**31 - 1):
        case.table[0, 1] = bad
        got = fp8_paged_mqa_logits(case.q, case.cache, case.weights, i32([1000]), case.table[:, :3], None, 30)
        assert_logits(got[:, :20], expected)
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


CASE = {"q": torch.zeros(1, 2, 3, 8).to(torch.float8_e4m3fn), "kv_cache": poisoned_cache(4, 8, 8)}
CASE |= {"weights": torch.zeros(2, 3), "context_lens": i32([20]), "block_table": i32([[0, 1, 2]])}
CASE |= {"schedule_meta": None, "max_context_len": 20}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_lens", i32([[20, 20, 20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 3\]"),
        ("context_lens", i32([[20]]), r"context_lens: shape must be \[1\] or \[1, 2\], got \[1, 1\]"),
        ("weights", torch.zeros(1, 3), r"weights: shape must be \[2, 3\], got \[1, 3\]"),
        ("kv_cache", CASE["kv_cache"][..., :11], r"kv_cache: shape must be \[pages, P, 1, 12\], got"),
        ("block_table", CASE["block_table"].long(), "block_table: dtype must be int32, got int64"),
        ("max_context_len", 0, "max_context_len: must be at least 1, got 0"),
        ("schedule_meta", i32([0, 0]), r"schedule_meta: shape must be \[SMs \+ 1, 2\], got \[2\]"),
    ],
)
def test_wrong_arguments_are_named(name, value, message):
    assert_refused(message, fp8_paged_mqa_logits, **CASE | {name: value})


def test_plan_by_hand():
    # 600, 0 and 256 keys are 3, 0 and 1 splits; 3 SMs get 1, 1 and 2 of them
    plan = get_paged_mqa_logits_metadata(i32([600, 0, 256]), 64, 3)
    assert plan.dtype == torch.int32
    assert plan.tolist() == [[0, 0], [0, 1], [0, 2], [3, 0]]
    # the second sequence starts at its second split
    assert get_paged_mqa_logits_metadata(i32([256, 1024]), 64, 2).tolist() == [[0, 0], [1, 1], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([0, 0]), 64, 2).tolist() == [[2, 0], [2, 0], [2, 0]]
    assert get_paged_mqa_logits_metadata(i32([]), 64, 2).tolist() == [[0, 0], [0, 0], [0, 0]]
    # the longest query of a sequence counts
    assert get_paged_mqa_logits_metadata(i32([[1, 600], [0, 0], [256, 9]]), 64, 3).tolist() == plan.tolist()


@pytest.mark.parametrize("num_sms", [1, 2, 7, 132])
def test_plan_covers_all_work_once_and_evenly(num_sms):
    for batch in (1, 3, 40):
        lengths = torch.randint(0, 3000, (batch,), dtype=torch.int32)
        lengths[torch.rand(batch) < 0.3] = 0
        work = [(b, s) for b, n in enumerate(lengths.tolist()) for s in range(math.ceil(n / 256))]
        plan = [tuple(x) for x in get_paged_mqa_logits_metadata(lengths, 64, num_sms).tolist()]
        assert plan == sorted(plan) and plan[-1] == (batch, 0) and len(plan) == num_sms + 1
        shares = [[item for item in work if first <= item < end] for first, end in itertools.pairwise(plan)]
        assert list(itertools.chain(*shares)) == work
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1
        assert all(first in work for first, share in zip(plan, shares) if share)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((i32([1]), 48, 1), "block_kv: must be a divisor of 256, got 48"),
        ((i32([1]), 64, 0), "num_sms: must be at least 1, got 0"),
        (([1], 64, 1), r"context_lens: must be a torch.Tensor, got list"),
    ],
)
def test_wrong_arguments_of_a_plan_are_named(arguments, message):
    assert_refused(message, get_paged_mqa_logits_metadata, *arguments)
