"""Scores of the lightning indexer over contiguous keys."""

from dsa.ops._reference_only import reference_only
from reference import indexer_logits as reference

fp8_mqa_logits = reference_only(reference.fp8_mqa_logits)
mqa_logits = reference.mqa_logits  # unquantised: for parity and research, in PyTorch by design
