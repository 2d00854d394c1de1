"""DeepGEMM's signatures over the paged index-score kernel and its plan, at sizes of DeepGEMM's own tests."""

import pytest
import torch

import dsa
from dsa.compat import deep_gemm
from dsa.reference.indexer import fp8_paged_mqa_logits as reference
from dsa.testing import calc_diff, poison_free_memory
from tests.gpu.op_checks import assert_equal, replays

E4M3, INT32, PAGE, DIM = torch.float8_e4m3fn, torch.int32, 64, 128
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5}


class Case:
    """Sequences of about `mean` keys in pages of any order. rows: so many rows of one query for each, or None: one row
    of `next_n` queries for each."""

    def __init__(self, batch, mean, heads, next_n=1, rows=None):
        lengths = torch.randint(int(0.7 * mean), int(1.3 * mean), (batch,), device="cuda", dtype=INT32)
        pages = ((lengths + PAGE) // PAGE + 1).tolist()
        keys = torch.randint(0, 0x70, (sum(pages), PAGE * DIM), dtype=torch.uint8, device="cuda")
        scales = torch.rand(sum(pages), PAGE, device="cuda") + 0.1
        self.cache = torch.cat((keys, scales.view(torch.uint8)), 1).view(-1, PAGE, 1, DIM + 4)
        self.table = torch.zeros(batch, max(pages), dtype=INT32, device="cuda")
        order, first = torch.randperm(sum(pages), device="cuda").to(INT32), 0
        for b, count in enumerate(pages):
            self.table[b, :count], first = order[first : first + count], first + count
        self.columns, self.indices = max(pages) * PAGE, None
        if rows is not None:
            self.indices = torch.arange(batch, device="cuda", dtype=INT32).repeat_interleave(rows)
            offsets = torch.cat([torch.arange(n, device="cuda", dtype=INT32) for n in rows.tolist()])
            self.lengths = (lengths[self.indices.long()] + offsets)[:, None]
            self.table = self.table[self.indices.long()]
        else:
            self.lengths = (torch.rand(batch, next_n, device="cuda") * (lengths[:, None] + 1)).to(INT32)
            self.lengths[:, -1] = lengths
        shape = (*self.lengths.shape, heads, DIM)
        self.q = torch.randn(shape, device="cuda").to(E4M3)
        self.weights = torch.randn(self.lengths.numel(), heads, device="cuda")

    def arguments(self, plan):
        return self.cache, self.weights, self.lengths, self.table, plan, self.columns

    def check(self, logits_dtype, record_error):
        plan = deep_gemm.get_paged_mqa_logits_metadata(
            self.lengths, PAGE, deep_gemm.get_num_sms(), indices=self.indices
        )
        poison_free_memory(mebibytes=64)
        named = {"indices": self.indices, "logits_dtype": logits_dtype}
        got = deep_gemm.fp8_fp4_paged_mqa_logits((self.q, None), *self.arguments(plan), **named)
        expected = reference.fp8_paged_mqa_logits(self.q, *self.arguments(None), True, logits_dtype)
        hidden = torch.arange(self.columns, device="cuda") >= self.lengths.view(-1, 1)
        assert got.shape == expected.shape and got.dtype == logits_dtype
        shown = got.masked_fill(hidden, 0)
        difference = calc_diff(shown, expected.masked_fill(hidden, 0))
        record_error(difference)
        assert difference < MAX_DIFF[logits_dtype]
        for other in (None, self.indices):
            named["indices"] = other
            again = deep_gemm.fp8_fp4_paged_mqa_logits((self.q, None), *self.arguments(plan), **named)
            assert_equal(again.masked_fill(hidden, 0), shown)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
def test_paged_mqa_logits(logits_dtype, next_n, heads, record_error):
    Case(64, 4096, heads, next_n).check(logits_dtype, record_error)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("most", [6, 10])
def test_rows_of_a_sequence_that_indices_name(most, heads, record_error):
    """DeepGEMM's variable-length form: every row its own length, and a sequence's rows one after the other."""
    rows = torch.randint(1, most + 1, (32,), device="cuda")
    Case(32, 4096, heads, rows=rows).check(torch.float32, record_error)


@pytest.mark.parametrize("parts", [7, 66, 132])
def test_a_plan_of_any_number_of_parts_in_a_graph(parts):
    """vLLM plans for half of the multiprocessors where next_n is 4; a replay follows new lengths."""
    case = Case(40, 2000, 64, 4)

    def call(_):
        plan = deep_gemm.get_paged_mqa_logits_metadata(case.lengths, PAGE, parts)
        return deep_gemm.fp8_fp4_paged_mqa_logits((case.q, None), *case.arguments(plan))

    for got in replays(call, (case.lengths,), lambda: torch.randint(0, 2000, case.lengths.shape)):
        hidden = torch.arange(case.columns, device="cuda") >= case.lengths.view(-1, 1)
        expected = dsa.fp8_paged_mqa_logits(case.q, *case.arguments(None))
        assert_equal(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))
