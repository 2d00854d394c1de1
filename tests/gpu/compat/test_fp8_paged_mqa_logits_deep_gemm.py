"""DeepGEMM's signatures of the paged index-score kernel and its plan, at sizes of DeepGEMM's own tests."""

import pytest
import torch

from dsa.compat import deep_gemm
from dsa.testing import poison_free_memory
from tests.gpu.attention import case_of, int32
from tests.gpu.case_checks import by_sizes, grid
from tests.gpu.op_checks import replays

CASE, PAGE = case_of("fp8_paged_mqa_logits"), 64


def inputs(batch, mean, heads, next_n=1, **options):
    """Sequences of about `mean` keys, and with more than one query each query's number of keys."""
    lengths = torch.randint(int(0.7 * mean), int(1.3 * mean), (batch,)).tolist()
    sizes = {"lengths": lengths, "next_n": next_n, "heads": heads, "dim": 128, "page_size": PAGE, "per_query": True}
    columns = (max(lengths) // PAGE + 2) * PAGE
    return CASE.arguments("cuda", columns=columns, num_sms=0, clean_logits=False, **sizes, **options)


def logits_of(given, parts, indices=(None, None)):
    """The scores by a plan of so many parts. indices: those of the plan and those of the scores."""
    names = ("kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len")
    plan = deep_gemm.get_paged_mqa_logits_metadata(given["context_lens"], PAGE, parts, indices=indices[0])
    arguments, options = [(given | {"schedule_meta": plan})[name] for name in names], {"indices": indices[1]}
    options["logits_dtype"] = given["logits_dtype"]
    return deep_gemm.fp8_fp4_paged_mqa_logits((given["q"], None), *arguments, **options)


@by_sizes(grid(logits_dtype=(torch.bfloat16, torch.float32), next_n=(1, 2, 3, 4), heads=(32, 64)))
def test_logits_are_right(sizes, record_error):
    given = inputs(64, 4096, **sizes)
    poison_free_memory(mebibytes=64)
    record_error(CASE.check(given, [logits_of(given, deep_gemm.get_num_sms())]))


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("most", [6, 10])
def test_rows_of_a_sequence_that_indices_name_are_right(most, heads, record_error):
    """DeepGEMM's variable-length form: every row has its length, and rows of a sequence follow each other."""
    counts = torch.randint(1, most + 1, (32,), device="cuda")
    sequence = torch.arange(32, device="cuda").repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequence]
    given = inputs(len(sequence), 4096, heads)
    for name in ("context_lens", "block_table"):
        given[name] = given[name][first]
    given["context_lens"] -= int32(torch.arange(len(sequence), device="cuda") - first)[:, None]
    for of_scores in (sequence.int(), None):
        poison_free_memory(mebibytes=64)
        found = logits_of(given, deep_gemm.get_num_sms(), (sequence.int(), of_scores))
        record_error(CASE.check(given, [found]))


@pytest.mark.parametrize("parts", [7, 66, 132])
def test_a_plan_of_any_number_of_parts_follows_new_lengths_in_a_graph(parts):
    """vLLM plans for half of the SMs where next_n is 4."""
    given = inputs(40, 2000, 64, 4)
    lengths = given["context_lens"]

    def call(_):
        return logits_of(given, parts)

    for found in replays(call, (lengths,), lambda: torch.randint(0, 1400, lengths.shape)):
        CASE.check(given, [found])
