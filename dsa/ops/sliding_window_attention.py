"""Attention to the last keys of each sequence, and the merge of branches with disjoint keys."""

from dsa.ops._reference_only import reference_only
from reference import sliding_window as reference

sliding_window_attention = reference_only(reference.sliding_window_attention)
merge_attention = reference_only(reference.merge_attention)
