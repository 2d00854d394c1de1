"""Paged index scores and their plan called through DeepGEMM's signatures (`dsa.compat.deep_gemm`), at sizes of
DeepGEMM's own tests."""

import torch

from dsa.compat import deep_gemm
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of
from tests.gpu.case_checks import by_sizes, grid

CASE, PAGE = case_of("fp8_paged_mqa_logits"), 64


@by_sizes(grid(logits_dtype=(torch.bfloat16, torch.float32), next_n=(1, 2, 3, 4), heads=(32, 64)))
def test_logits_are_right(sizes, record_error):
    lengths = torch.randint(2867, 5324, (64,)).tolist()
    options = {"dim": 128, "page_size": PAGE, "per_query": True, "num_sms": 0, "clean_logits": False}
    given = CASE.arguments("cuda", lengths=lengths, columns=(max(lengths) // PAGE + 2) * PAGE, **options, **sizes)
    plan = deep_gemm.get_paged_mqa_logits_metadata(given["context_lens"], PAGE, deep_gemm.get_num_sms())
    names = ("kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len")
    arguments = [(given | {"schedule_meta": plan})[name] for name in names]
    poison_free_memory(mebibytes=64)
    found = deep_gemm.fp8_fp4_paged_mqa_logits((given["q"], None), *arguments, logits_dtype=sizes["logits_dtype"])
    record_error(CASE.check(given, [found]))
