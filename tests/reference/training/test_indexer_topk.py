"""The reference of indexer_topk (the selection in training): it never selects NaN."""

import torch

from dsa.cases import cases_of
from dsa.reference import indexer_topk


def test_nan_is_never_selected():
    given = cases_of("indexer_topk")[0].arguments(lengths=((2, 6),), top_k=6, causal=False)
    given["k_idx"][3] = torch.nan
    assert 3 not in indexer_topk(**given)
