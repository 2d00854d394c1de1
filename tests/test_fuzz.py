"""20,000 calls of the ops with wrong and unusual arguments, in 40 shards that run in parallel. Ten shards always run.
The others are marked slow, so without --all only a sample of them runs.

For more calls with other arguments: DSA_FUZZ_CASES=200000 DSA_FUZZ_SEED=7 pytest tests/test_fuzz.py. The message of a
failure contains the variables with which to repeat it.
"""

import pytest

from tests.fuzz import SEED, failures, numbers

SHARDS = 40
OFTEN = SHARDS // 4


@pytest.mark.parametrize(
    "shard", [*range(OFTEN), *(pytest.param(n, marks=pytest.mark.slow) for n in range(OFTEN, SHARDS))]
)
def test_wrong_arguments(shard):
    wanted = numbers(shard, SHARDS, 20_000)
    found = failures(wanted, "cpu")
    assert not found, f"seed {SEED}: {len(found)} of {len(wanted)} cases:\n" + "\n".join(found[:20])
