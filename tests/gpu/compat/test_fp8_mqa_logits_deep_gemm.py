"""Index scores called through DeepGEMM's signature (`dsa.compat.deep_gemm`), at sizes of DeepGEMM's own tests."""

import pytest
import torch

from dsa.cases.indexer import RANGES
from dsa.compat import deep_gemm
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of, int32
from tests.gpu.case_checks import by_sizes, grid

CASE = case_of("fp8_mqa_logits")
QUERIES, KEYS = 2048, 8192


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("context_parallel", [False, True])
@by_sizes(grid(logits_dtype=(torch.bfloat16, torch.float32), heads=(32, 64), dim=(32, 64, 128)))
def test_logits_are_right(sizes, context_parallel, compressed, record_error):
    """Use the key ranges of DeepGEMM's `generate_ks_ke_tests`. All of them begin at key 0.

    context_parallel: if True, the queries are those of rank 1 of 4 ranks. Half of them are early in the sequence, half
    are late. If False, they are the last queries of the sequence.
    """
    given = CASE.arguments("cuda", queries=QUERIES, keys=KEYS, window=KEYS, clean_logits=not compressed, **sizes)
    if context_parallel:
        rows, half = torch.arange(QUERIES), QUERIES // 2
        last = torch.cat((half + rows[:half], 6 * half + rows[:half]))
        given |= {"cu_seq_len_k_start": int32(torch.zeros(QUERIES)), "cu_seq_len_k_end": int32(last)}
    given["max_seqlen_k"] = int(given["cu_seq_len_k_end"].max()) if compressed else 0
    names = ("kv", "weights", *RANGES, "clean_logits", "max_seqlen_k", "logits_dtype")
    poison_free_memory(mebibytes=64)
    found = deep_gemm.fp8_fp4_mqa_logits((given["q"], None), **{name: given[name] for name in names})
    record_error(CASE.check(given, [found]))
