"""Test the index scores of `dsa.compat.deep_gemm` on the CPU, with smaller versions of DeepGEMM's test cases."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.compat import deep_gemm
from tests.reference.common import BF16, BYTE, E4M3, F32, assert_refused, assert_same_bits, i32, zeros

CASE, _, _ = cases_of("fp8_mqa_logits")
_, PAGED = cases_of("fp8_paged_mqa_logits")
POSITIONS = ("kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
PAGED_POSITIONS = ("kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len")


def ranges(queries, keys, context_parallel):
    """Return keyword arguments of `fp8_mqa_logits`: the key ranges of DeepGEMM's `generate_ks_ke_tests`."""
    rows, last = torch.arange(queries), keys - queries
    if context_parallel:
        half, ranks = queries // 2, keys // queries
        rank = ranks // 3
        rows, last = torch.cat((rank * half + rows[:half], (2 * ranks - 1 - rank) * half + rows[:half])), 0
    return {"cu_seq_len_k_start": i32([0] * queries), "cu_seq_len_k_end": (rows + last).int()}


@pytest.mark.parametrize("logits_dtype", [BF16, F32])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 32), (64, 64), (32, 128), (64, 128)])
@pytest.mark.parametrize("context_parallel", [False, True])
def test_contiguous(logits_dtype, compressed, heads, head_dim, context_parallel):
    """The cases of DeepGEMM's `test_mqa_logits`. Compressed logits have a column per key of the longest range, and are
    not cleaned."""
    given = CASE.arguments(queries=16, keys=64, heads=heads, dim=head_dim) | ranges(16, 64, context_parallel)
    most = int((given["cu_seq_len_k_end"] - given["cu_seq_len_k_start"]).max()) if compressed else 0
    given |= {"max_seqlen_k": most, "clean_logits": not compressed, "logits_dtype": logits_dtype}
    named = {name: x for name, x in given.items() if name != "accumulators"} | {"q": (given["q"], None)}
    got = deep_gemm.fp8_fp4_mqa_logits(**named)
    assert got.shape == (16, most or 64)
    CASE.check(given, [got])


def contiguous_call():
    given = CASE.arguments(queries=5, keys=20, heads=8, dim=32)
    return given["q"], [given[name] for name in POSITIONS]


def test_contiguous_by_position():
    q, arguments = contiguous_call()
    got, old = deep_gemm.fp8_fp4_mqa_logits((q, None), *arguments, 20), deep_gemm.fp8_mqa_logits(q, *arguments)
    assert got.shape == (5, 20) and got.dtype == F32
    assert torch.equal(got, dsa.fp8_mqa_logits(q, *arguments, False, 20))
    assert torch.equal(got, deep_gemm.fp8_mqa_logits(q, *arguments, False, 20))
    assert torch.equal(old, dsa.fp8_mqa_logits(q, *arguments))
    # Logits are cleaned by default, as in DeepGEMM 2.8.0 and earlier.
    assert torch.equal(old, deep_gemm.fp8_fp4_mqa_logits((q, None), *arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (zeros(5, 8, 32, dtype=E4M3), i32([[0] * 8] * 5))}, r"q\[1\]: must be None on Hopper, .*, got Tensor"),
        ({"q": zeros(5, 8, 32, dtype=E4M3)}, "q: must be a pair"),
        ({"schedule_meta": i32([0])}, "schedule_meta: must be None on Hopper, got Tensor"),
        ({"max_seqlen_k": -1}, "max_seqlen_k: must be at least 0, got -1"),
        # In `fp8_mqa_logits`, DeepGEMM's function before 2.8, the sixth parameter is the bool clean_logits. So a caller
        # who passes a bool here means the old function.
        ({"max_seqlen_k": True}, "max_seqlen_k: must be an integer, got True"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    q, arguments = contiguous_call()
    named = dict(zip(POSITIONS, arguments)) | {"q": (q, None), "max_seqlen_k": 20, "schedule_meta": None}
    assert_refused(message, deep_gemm.fp8_fp4_mqa_logits, **named | changes)


@pytest.mark.parametrize("logits_dtype", [BF16, F32])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("varlen", [False, True])
def test_paged(logits_dtype, next_n, heads, varlen):
    """The cases of DeepGEMM's `test_paged_mqa_logits`, with a length per query. varlen: each query is a row of q, and
    `indices` names its sequence."""
    lengths, own_n, indices = (70, 192, 64), next_n, None
    if varlen:
        lengths, own_n, indices = (70,) * next_n + (192, 64), 1, i32([0] * next_n + [1, 2])
    sizes = {"lengths": lengths, "next_n": own_n, "heads": heads, "dim": 128, "page_size": 64, "columns": 192}
    given = PAGED.arguments(**sizes, per_query=True) | {"logits_dtype": logits_dtype, "clean_logits": False}
    context = given["context_lens"]
    plan = deep_gemm.get_paged_mqa_logits_metadata(context, 64, deep_gemm.get_num_sms(), indices=indices)
    assert plan.shape == (133, 2) and torch.equal(plan, deep_gemm.get_paged_mqa_logits_metadata(context, 64, 132))
    arguments = [(given | {"schedule_meta": plan})[name] for name in PAGED_POSITIONS]
    call = deep_gemm.fp8_fp4_paged_mqa_logits
    got = call((given["q"], None), *arguments, indices=indices, logits_dtype=logits_dtype)
    PAGED.check(given, [got])
    assert torch.equal(got, call((given["q"], None), *arguments, None, logits_dtype=logits_dtype))


def paged_call(queries=1):
    context = i32([[5], [6], [0]]).repeat(1, queries)
    rest = zeros(4, 64, 1, 36, dtype=BYTE), zeros(3 * queries, 8), context, i32([[0]] * 3), None, 64
    return zeros(3, queries, 8, 32, dtype=E4M3), rest


@pytest.mark.parametrize(
    "call",
    [
        lambda q, rest, indices: deep_gemm.get_paged_mqa_logits_metadata(rest[2], 64, 5, indices),
        lambda q, rest, indices: deep_gemm.get_paged_mqa_logits_metadata(rest[2][:, 0], 64, 5, indices),
        lambda q, rest, indices: deep_gemm.fp8_fp4_paged_mqa_logits((q, None), *rest, indices),
        lambda q, rest, indices: deep_gemm.fp8_paged_mqa_logits(q, *rest, False, indices),
    ],
)
def test_indices_are_checked_and_change_nothing(call):
    good = i32([7, 7, -3])
    assert_same_bits([call(*paged_call(), good)], [call(*paged_call(), None)])
    for indices, message in (
        (good.long(), "indices: dtype must be int32, got int64"),
        (good[:2], r"indices: shape must be \[3\], got \[2\]"),
        (good.to("meta"), "indices: must be on .* device cpu, got meta"),
        (True, r"indices: must be a torch\.Tensor, got bool"),
    ):
        assert_refused(message, call, *paged_call(), indices)


def test_indices_are_refused_with_more_than_one_query_a_row():
    (q, rest), good, message = paged_call(2), i32([7, 7, -3]), "indices: must be None with more than one query a row of"
    assert_refused(f"{message} context_lens", deep_gemm.get_paged_mqa_logits_metadata, rest[2], 64, 5, good)
    assert_refused(f"{message} q", deep_gemm.fp8_paged_mqa_logits, q, *rest, False, good)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 2), (4, 7, 2), (2, 4, 1), (0, 3)])
def test_scales_by_columns(shape):
    scales, column = torch.randn(shape), -(-shape[-2] // 4) * 4
    got = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    assert torch.equal(got, scales) and got.stride()[-2:] == (1, column)
    assert len(shape) == 2 or got.stride(0) == column * shape[-1]
    assert deep_gemm.get_mn_major_tma_aligned_tensor(got) is got
    assert deep_gemm.get_tma_aligned_size(shape[-2], 4) == column
    message = "sf: dtype must be float32, got float16"
    assert_refused(message, deep_gemm.get_mn_major_tma_aligned_tensor, scales.half())
