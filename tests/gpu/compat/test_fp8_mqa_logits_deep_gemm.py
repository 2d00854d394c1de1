"""DeepGEMM's signatures of the index-score kernel, at sizes of DeepGEMM's own tests."""

import pytest
import torch

from dsa.cases.indexer import RANGES
from dsa.compat import deep_gemm
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of, int32
from tests.gpu.case_checks import by_sizes, grid
from tests.gpu.op_checks import captured

CASE = case_of("fp8_mqa_logits")
QUERIES, KEYS, NAMES = 2048, 8192, ("kv", "weights", *RANGES)


def context_parallel(given):
    """Two parts of the queries, one early and one late, as `generate_ks_ke_tests` gives them to rank 1 of 4."""
    rows, half = torch.arange(QUERIES), QUERIES // 2
    last = torch.cat((half + rows[:half], 6 * half + rows[:half]))
    return given | {"cu_seq_len_k_start": int32(torch.zeros(QUERIES)), "cu_seq_len_k_end": int32(last)}


def inputs(is_parallel, compressed=False, **sizes):
    """compressed: logits have a column per key of the longest range, and are not cleaned."""
    given = CASE.arguments("cuda", queries=QUERIES, keys=KEYS, window=KEYS, clean_logits=not compressed, **sizes)
    given = context_parallel(given) if is_parallel else given
    most = max(given["cu_seq_len_k_end"] - given["cu_seq_len_k_start"])
    return given | {"max_seqlen_k": int(most) if compressed else 0}


@pytest.mark.parametrize("is_parallel", [False, True])
@by_sizes(
    grid(compressed=(False, True), logits_dtype=(torch.bfloat16, torch.float32), heads=(32, 64), dim=(32, 64, 128))
)
def test_logits_are_right(sizes, is_parallel, record_error):
    given = inputs(is_parallel, **sizes)
    poison_free_memory(mebibytes=64)
    names = (*NAMES, "clean_logits", "max_seqlen_k", "logits_dtype")
    found = deep_gemm.fp8_fp4_mqa_logits((given["q"], None), **{name: given[name] for name in names})
    record_error(CASE.check(given, [found]))


def test_positional_arguments_in_a_graph_are_right():
    """As vLLM calls it, and the older name of the function."""
    given = inputs(True, compressed=True, heads=64, dim=128)
    tensors = [given[name] for name in NAMES]
    graph, found = captured(deep_gemm.fp8_fp4_mqa_logits, (given["q"], None), *tensors, given["max_seqlen_k"])
    graph.replay()
    CASE.check(given, [found])
    CASE.check(given | {"max_seqlen_k": 0, "clean_logits": True}, [deep_gemm.fp8_mqa_logits(given["q"], *tensors)])
