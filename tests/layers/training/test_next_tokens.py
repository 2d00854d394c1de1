"""Targets stay within their sequence."""

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.parallel.ranks import Ranks
from dsa_layers.training.indexer_stage import IndexerStage
from dsa_layers.training.next_tokens import next_tokens
from tests.layers.training.test_indexer_stage import Small
from tests.reference.common import assert_refused

TOKENS = torch.arange(10, 17)
BATCH = SequenceBatch.without_cache([3, 1, 3])


def test_a_sequence_s_last_token_has_no_target():
    expected = [11, 12, -100, -100, 15, 16, -100]
    share = IndexerStage(Small(6), "sparse").share([3, 1, 3], Ranks(0, 1))
    starts = torch.tensor([0, 0, 3, 4, 7, 7], dtype=torch.int32)  # empty sequences, too
    for sequences in (BATCH, share, starts):
        assert next_tokens(TOKENS, sequences).tolist() == expected
    assert next_tokens(TOKENS[:0], starts[:1]).tolist() == []
    assert share.mean(torch.tensor([1.0, 1, 0, 0, 1, 1, 0]), count=4) == 1
    assert_refused("count: must be at least 1, got 0", share.mean, torch.ones(7), count=0)


@pytest.mark.parametrize(
    ("tokens", "sequences", "message"),
    [
        (TOKENS.int(), BATCH, "tokens: dtype must be int64, got int32"),
        (TOKENS[1:], BATCH, r"tokens: shape must be \[7\], got \[6\] \(sizes as of sequences\)"),
        (TOKENS, [3, 1, 3], r"sequences: must be a SequenceBatch or int32 \[B \+ 1\], .*, got list"),
        (TOKENS, torch.tensor([0, 7]), "sequences: dtype must be int32, got int64"),
        (TOKENS, torch.tensor([0, 3]).int(), r"sequences: must ascend from 0 to 7, got \[0, 3\]"),
    ],
)
def test_what_are_no_sequences_of_the_tokens(tokens, sequences, message):
    assert_refused(message, next_tokens, tokens, sequences)
