"""`fp8_paged_mqa_logits` on a CPU, where launches are recorded and no kernel runs: the layout of fake results, the
kernels' arguments, and when fp16 accumulation is chosen."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.ops.indexer import fp8_paged_mqa_logits as op

CASE = cases_of("fp8_paged_mqa_logits")[1]
SCORES = torch.ops.dsa.fp8_paged_mqa_logits
PER_QUERY = torch.tensor([[70, 3], [0, 64], [1, 100]], dtype=torch.int32)


def arguments(next_n=2, heads=8, columns=50, **options):
    sizes = {"lengths": (70, 0, 128), "next_n": next_n, "heads": heads, "columns": columns, "num_sms": 0}
    return CASE.arguments(**sizes, **{"clean_logits": False, "accumulators": torch.float32} | options)


def layout(x):
    return x.shape, x.stride(), x.dtype


def shifted(x, bytes_):
    """Return a copy of x that starts `bytes_` bytes after a multiple of 16 bytes."""
    raw = x.contiguous().view(torch.uint8).flatten()
    buffer = torch.cat((raw.new_zeros(16), raw.new_zeros(bytes_), raw))[16 + bytes_ :]
    return buffer.as_strided(x.shape, x.contiguous().stride()) if x.dtype == torch.uint8 else buffer.view(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 256, 257, 1000])
def test_fake_results_are_laid_out_as_the_real_ones(columns, dtype):
    given = arguments(columns=columns, logits_dtype=dtype)
    fake = SCORES(**{name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()})
    assert fake.is_meta and layout(fake) == layout(CASE.run(given)[0])


def test_what_the_kernels_get(launches):
    given = arguments(columns=1000, clean_logits=True)
    q, cache, weights, lengths, table = (given[x] for x in ("q", "kv_cache", "weights", "context_lens", "block_table"))
    (out,) = CASE.run(given | {"weights": shifted(weights, 4).view(6, 8)})
    (_, (planned, plan)), (variant, got) = launches
    assert torch.equal(planned, lengths[:, None]) and layout(plan) == ((133, 2), (2, 1), torch.int32)
    assert variant[:-1] == (8, 32, 2, 32, "float32", False)
    flat, pages, rows, column, blocks, schedule, whole, capacity, filled = got
    assert layout(flat) == ((3 * 2 * 8, 32), (32, 1), torch.float8_e4m3fn) and flat.data_ptr() == q.data_ptr()
    assert layout(pages) == ((10, 32 * 36), (32 * 36, 1), torch.uint8) and pages.data_ptr() == cache.data_ptr()
    assert torch.equal(rows, weights) and rows.data_ptr() % 16 == 0
    assert torch.equal(column, lengths[:, None]) and blocks is table and schedule is plan and whole is out
    assert (capacity, filled) == (5 * 32, 1000)
    # The last query has 100 keys, more than the logits' 50 columns. With clean_logits=False the kernel writes no -inf
    # after the keys.
    CASE.run(given | {"context_lens": PER_QUERY, "schedule_meta": plan, "max_context_len": 50, "clean_logits": False})
    _, got = launches[2]
    assert got[2] is weights and got[3] is PER_QUERY and got[7:] == (50, 0)
    # The row stride of 36 bytes is not a multiple of 16 bytes, so the op copies the weights.
    CASE.run(given | {"weights": torch.randn(6, 9)[:, :8], "schedule_meta": plan})
    assert layout(launches[3][1][2]) == ((6, 8), (8, 1), torch.float32)


@pytest.mark.parametrize(
    ("heads", "next_n", "expected"), [(64, 4, True), (64, 3, True), (64, 2, False), (64, 1, False), (32, 4, False)]
)
def test_fp16_accumulation_only_where_arithmetic_bounds(heads, next_n, expected, launches):
    for accumulators in (torch.float16, torch.float32):
        CASE.run(arguments(next_n, heads, accumulators=accumulators))
    chosen = [variant[:-1] for variant, _ in launches if variant]
    assert chosen == [(heads, 32, next_n, 32, "float32", half) for half in (expected, False)]


def test_a_matrix_of_contiguous_rows():
    x = torch.arange(24, dtype=torch.int32).view(4, 6)
    assert op._matrix(x) is x
    assert op._matrix(x[:, 1:3]).stride() == (6, 1)
    for vector, stride in ((x[1], 1), (x[1, 1:], 1), (x[0, ::2], 2), (x[:, 4], 6), (x[0, :1].expand(3), 0)):
        got = op._matrix(vector)
        assert got.stride() == (stride, 1) and torch.equal(got, vector[:, None])
    column = x.as_strided((4, 1), (6, 9), 3)
    assert op._matrix(column).stride() == (6, 1) and torch.equal(op._matrix(column), column)
