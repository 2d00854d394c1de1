"""Exact, deterministic top-k selection."""

from dsa.ops._reference_only import reference_only
from reference import topk as reference

topk_indices = reference_only(reference.topk_indices)
