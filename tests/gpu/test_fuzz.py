"""Calls of ops on the GPU with wrong and unusual arguments.

`tests.fuzz` makes the arguments and decides whether a call's result or error is right.
"""

import pytest

from tests.fuzz import SEED, failures, numbers

SHARDS = 8


@pytest.mark.parametrize("shard", range(SHARDS))
def test_wrong_arguments(shard):
    wanted = numbers(shard, SHARDS, 4_000)
    found = failures(wanted, "cuda")
    assert not found, f"seed {SEED}: {len(found)} of {len(wanted)} cases:\n" + "\n".join(found[:20])
