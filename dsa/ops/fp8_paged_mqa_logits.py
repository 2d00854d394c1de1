"""Scores of the lightning indexer over a paged cache, and the plan that the kernel follows."""

from dsa.ops._reference_only import reference_only
from reference import paged_indexer_logits as reference

get_paged_mqa_logits_metadata = reference_only(reference.get_paged_mqa_logits_metadata)
fp8_paged_mqa_logits = reference_only(reference.fp8_paged_mqa_logits)
