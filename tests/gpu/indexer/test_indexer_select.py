"""indexer_select on the GPU has the bits of fp8_mqa_logits and topk_indices, for every number of candidate passes
(candidate_lists.py)."""

import math
import sys

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.selection import require_two_ops
from dsa.kernels.indexer.candidate_lists import CAPACITY, GROUP, PARTS, bound_ranks, pass_strides
from dsa.kernels.indexer.limits import TWO_OPS_KEYS
from tests.gpu.attention import int32, replayed
from tests.gpu.indexer.scored_keys import FP32, RANGES, KeysInOnePiece, Op, accumulated
from tests.gpu.op_checks import assert_runs_have_the_same_bits

CASE = cases_of("indexer_select")[0]


def check(given, found):
    require_two_ops(given, found)
    assert torch.equal(dsa.indexer_select(**given | {"return_values": False}), found[0])


OP = Op(CASE, check)


def arguments(queries, keys, starts=0, ends=None, top_k=2048, accumulators=FP32, **sizes):
    """Return arguments in which query t sees the keys from starts[t] to ends[t] - 1. A single number holds for all
    queries."""
    given = OP.arguments(queries=queries, keys=keys, top_k=top_k, accumulators=accumulators, **sizes)
    bounds = (int32(x).expand(queries).contiguous() for x in (starts, keys if ends is None else ends))
    return given | dict(zip(RANGES, bounds))


@pytest.fixture(params=[1, 33, 500, 2048])
def op(request):
    return Op(CASE, check, {"top_k": request.param})


class TestKeysInOnePiece(KeysInOnePiece):
    """Run the shared tests with top_k = 1, 33, 500 and 2048."""


@accumulated
@pytest.mark.parametrize("longest", [6000, 26000])
def test_more_blocks_than_sms(longest, accumulators):
    """A CTA computes several blocks of queries. The CTA's ring buffers continue from one block to the next, also after
    odd numbers of key tiles."""
    starts, lengths = torch.randint(0, longest, (2, 3000), device="cuda", dtype=torch.int32)
    OP.verify(arguments(3000, longest + 400, starts, starts + lengths, 300, accumulators))


@pytest.mark.parametrize("heads", [8, 64])
def test_blocks_shared_by_two_sms(heads):
    """Two CTAs compute a block of queries together if the blocks are at most half as many as the SMs."""
    block_q, sms = 128 // heads if heads < 64 else 4, torch.cuda.get_device_properties(0).multi_processor_count
    for blocks in (1, 3, sms // 2, sms // 2 + 1, sms - 1, sms, sms + 1, 2 * sms - 1, 2 * sms + 7, 3 * sms, 4 * sms + 1):
        queries = blocks * block_q - 1
        OP.verify(arguments(queries, 9000, torch.randint(0, 300, (queries,)), top_k=700, heads=heads, dim=32))


# Relative frequencies of blocks of queries that see at most 0, 0, 70, 300, 2100, 9000 and all keys.
ODDS = [
    (9, 0, 0, 0, 0, 0, 1),
    (5, 1, 1, 1, 1, 1, 1),
    (1, 0, 4, 4, 0, 0, 1),
    (0, 0, 0, 0, 1, 1, 2),
    (1, 0, 0, 0, 0, 0, 0),
]


@accumulated
@pytest.mark.parametrize("odds", ODDS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(3200, 12000), (2700, 30000)])
def test_blocks_without_keys_between_others(queries, keys, odds, accumulators):
    """A CTA prepares its next block while it computes the current one."""
    block = torch.tensor(odds).float().multinomial(queries // 4, replacement=True)
    longest = torch.tensor([0, 0, 70, 300, 2100, 9000, keys])[block]
    lengths = (longest.repeat_interleave(4) * torch.rand(queries)).ceil().int()
    starts = ((keys - lengths) * torch.rand(queries)).int()
    OP.verify(arguments(queries, keys, starts, starts + lengths, 500, accumulators))


@pytest.mark.parametrize("top_k", [10, 2048])
@pytest.mark.parametrize("length", [CAPACITY + 1, 6000, 9000, 1 / 8, 1 / 4])
@pytest.mark.parametrize("keys", [30000, 100000, 300000])
def test_queries_that_see_little_of_their_blocks_sample(keys, length, top_k):
    """Of each four queries, one sees all keys. The tiles of a pass are chosen for the keys that the whole block sees.
    Few of these keys are visible to the other three queries."""
    length = int(length * keys) if length < 1 else length
    at = torch.linspace(0, keys - length, 48).int().view(16, 3)
    starts, ends = (torch.nn.functional.pad(x, (1, 0), value=n).flatten() for x, n in ((at, 0), (at + length, keys)))
    OP.verify(arguments(64, keys, starts, ends, top_k))


@pytest.mark.parametrize("top_k", [1, 2000, 2048])
def test_rows_of_very_different_lengths(top_k):
    """CAPACITY is the largest length of a candidate list."""
    keys, c = 70000, CAPACITY
    lengths = torch.tensor([0, 1, 15, 16, 17, 2047, 2048, 2049, c - 1, c, c + 1, 2 * c, 30000, keys])
    for n in (lengths, lengths[torch.randperm(len(lengths))]):
        for starts in (7 * torch.arange(len(n)), keys - n, (keys - n) // 2):
            OP.verify(arguments(len(n), keys, starts, starts + n, top_k))


# Number of keys -> the keys' scales. All keys are equal except for their scales.
SHAPES = {
    "ascending": lambda n: torch.arange(1, n + 1),
    "descending": lambda n: torch.arange(n, 0, -1),
    "equal": torch.ones,
    "two values": lambda n: torch.arange(n) % 2 + 1,
    "zeros but for a few": lambda n: (torch.arange(n) % 1000 == 7).float(),
    "the largest last": lambda n: torch.cat((torch.rand(n - 2500), 1 + torch.rand(2500))),
    "steps": lambda n: torch.arange(n) // 700 + 1,
    "many sizes": lambda n: torch.rand(n).mul(60).exp2(),
    "both infinities": lambda n: torch.tensor([torch.inf, -torch.inf, 1.0, -1.0, 0.0, -0.0])[torch.arange(n) % 6],
    "both signs, many sizes": lambda n: torch.randn(n) * torch.rand(n).mul(60).exp2(),
    "infinite": lambda n: torch.where(torch.arange(n) % 3 == 0, torch.inf, torch.rand(n)),
    # A bound is based on the scores of the sampled tiles. If these are above all others, the bound leaves too few
    # candidates. If they are below all others, the lists of candidates overflow.
    "large where sampled": lambda n: torch.rand(n) + 2 * _sampled(n),
    "small where sampled": lambda n: torch.rand(n) + 2 * ~_sampled(n),
    "large in the first pass": lambda n: torch.rand(n) + 2 * _sampled(n, pass_strides(n)[0]),
    "small in the first pass": lambda n: torch.rand(n) + 2 * ~_sampled(n, pass_strides(n)[0]),
    # The kernel for the first bound compares maxima instead of scores. Each is the maximum of scores that are 16
    # sampled tiles apart.
    "the largest in the same maxima": lambda n: torch.rand(n) + 2 * _sampled(n, 16 * pass_strides(n)[0]),
    "the smallest in the same maxima": lambda n: torch.rand(n) + 2 * ~_sampled(n, 16 * pass_strides(n)[0]),
    # Many scores are equal to the bound and to the k-th largest score.
    "a few levels": lambda n: torch.randint(1, 9, (n,)),
    "many levels": lambda n: torch.randint(1, n // 700, (n,)),
    # A warp ranks up to 32 keys that tie with the k-th largest score. Among more tied keys, the kernel searches for the
    # largest index to select.
    "20 or so of a level": lambda n: torch.randint(1, n // 20, (n,)),
    "31 of a level": lambda n: torch.arange(n) // 31 + 1,
    "32 of a level": lambda n: torch.arange(n) // 32 + 1,
    "33 of a level": lambda n: torch.arange(n) // 33 + 1,
    "33 of a level, apart": lambda n: torch.arange(n) % -(-n // 33) + 1,
    "zeros and more than are wanted": lambda n: torch.rand(n) * (torch.rand(n) < 0.2),
    "NaN": lambda n: torch.where(torch.rand(n) < 0.3, torch.nan, torch.rand(n)),
    "NaN but for a few": lambda n: torch.where(torch.rand(n) < 0.97, torch.nan, torch.rand(n)),
    "NaN where sampled": lambda n: torch.where(_sampled(n), torch.nan, torch.rand(n)),
}


def _sampled(keys, stride=4):
    """Return a mask of the keys in every stride-th key tile (candidate_passes.py). Tile r has the groups r, r + tiles,
    r + 2 tiles, ... of GROUP adjacent keys, at most PARTS of them."""
    tiles = math.ceil(math.ceil(keys / GROUP) / PARTS)
    return (torch.arange(keys) // GROUP) % tiles % stride == 0


@accumulated
@pytest.mark.parametrize("keys", [7000, 20000, 50000], ids=["two ops", "one pass for bounds", "two passes for bounds"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_any_shape(shape, sign, keys, accumulators):
    starts = [0, 5, keys // 2, 0, keys - 3000, 63, 0, 0, 1, 2]
    ends = [keys, keys - 1, keys, 3000, keys - 100, keys - 1000, keys, keys, keys, keys]
    given = arguments(10, keys, starts, ends, accumulators=accumulators)
    k = given["kv"][0][:1].expand(keys, -1).contiguous()
    given |= {"kv": (k, SHAPES[shape](keys).float().cuda()), "weights": sign * given["weights"].abs()}
    for top_k in (1, 500, 2048):
        OP.verify(given, top_k=top_k)


def _hardly_more_than_the_rank(keys):
    """Return scores for which each list has only a few more than `second_rank` candidates after the second pass. The
    bound for the last pass is the candidate of this rank.

    Any number slightly below these candidates is then a valid bound. The search ends after one pass, and the new bound
    is the beginning of a digit (a range of scores, see radix_select.py). If it were below the list's old bound, results
    would be wrong. The list does not contain keys with scores between the two bounds, and some of these keys are among
    the largest 2048.
    """
    strides = pass_strides(keys)
    first_rank, second_rank = bound_ranks(2048, strides)
    first, second = (_sampled(keys, stride) for stride in strides[:2])
    scores = torch.rand(keys) * 0.5
    free = torch.ones(keys, dtype=torch.bool)

    def place(count, where, low, high):
        places = (where & free).nonzero().flatten()
        chosen = places[torch.randperm(len(places))[:count]]
        scores[chosen] = low + (high - low) * torch.rand(count)
        free[chosen] = False

    place(first_rank, first, 1.96, 2.0)
    # More keys than the search's slack, a sixteenth of the rank. So the first bound is among these scores.
    place(first_rank // 8, first, 1.91, 1.92)
    place(second_rank + second_rank // 32 - first_rank, second & ~first, 1.96, 2.0)
    place(500, ~second, 1.96, 2.0)
    place(2500, free, 1.76, 1.88)
    return scores


@accumulated
@pytest.mark.parametrize("keys", [30000, 50000, 131072])
def test_a_bound_is_not_below_that_of_its_list(keys, accumulators):
    """Each query's scores have another factor, so that digits (see radix_select.py) begin at different positions."""
    given = arguments(96, keys, accumulators=accumulators)
    factors = torch.linspace(0, 1, 97, device="cuda")[:96, None].exp2()
    q, k = given["q"][:1].expand(96, -1, -1).contiguous(), given["kv"][0][:1].expand(keys, -1).contiguous()
    given |= {"q": q, "kv": (k, _hardly_more_than_the_rank(keys).cuda())}
    OP.verify(given, weights=given["weights"][:1].abs() * factors)


@accumulated
@pytest.mark.parametrize(
    ("starts", "ends", "top_k"), [([0, 30000] * 8, [30000, 60000] * 8, 2048), (0, [60000] * 15 + [30000], 100)]
)
def test_some_lists_overflow_and_others_do_not(starts, ends, top_k, accumulators):
    """Keys 0 to 29999 have scale 0, so their scores tie. The lists of queries that see only these keys overflow."""
    given = arguments(16, 60000, starts, ends, top_k, accumulators)
    given["kv"][1][:30000] = 0.0
    OP.verify(given)


@accumulated
@pytest.mark.parametrize("keys", [3000, 13000], ids=["two ops", "lists of candidates"])
def test_nan_is_never_selected(keys, accumulators):
    given = arguments(20, keys, top_k=700, accumulators=accumulators)
    k, scale = given["kv"]
    k.view(torch.uint8)[77], scale[150 : keys - 500] = 0x7F, torch.nan
    OP.verify(given)
    assert ((CASE.run(given)[0] >= 0).sum(1) == 500 + 150 - 1).all()


@pytest.mark.parametrize("times", [1, 5], ids=["two ops", "lists of candidates"])
def test_slots(times):
    """The block table has too few pages for some keys. In the last call all scores tie, so the lists of candidates
    overflow."""
    starts = times * int32([0] * 25 + [2000] * 25)
    given = arguments(50, times * 4000, starts, starts + times * int32(range(1000, 2000, 20)), 256)
    table = torch.randperm(128 * times, device="cuda").int().view(2, 64 * times)
    table[1, 3], table[0, 2] = -1, 2**31 - 1
    sequences = int32([0] * 25 + [1] * 23 + [2, -1])
    OP.verify(given, block_table=table[:, : 30 * times], page_size=64, row_to_seq=sequences)
    of_rows = {"block_table": table[sequences.clamp(0, 1).long()], "page_size": 32}
    OP.verify(given | of_rows)
    given["kv"][1].fill_(0.0)
    OP.verify(given | of_rows)


def test_more_queries_than_a_launch_has(monkeypatch):
    monkeypatch.setattr(sys.modules["dsa.ops.indexer.indexer_select"], "MOST_QUERIES", 16)
    starts = torch.randint(0, 9000, (50,))
    given = arguments(50, 20000, starts, starts + 10000, 256)
    table, sequences = torch.randperm(1280, device="cuda").int().view(2, 640), int32(range(50)) % 2
    OP.verify(given)
    OP.verify(given, row_to_seq=sequences, block_table=table, page_size=32)
    OP.verify(given, block_table=table[sequences.long()], page_size=32)


@accumulated
def test_long_contexts(accumulators):
    keys = 2**24 + 2**20
    k = torch.randint(0, 0x78, (keys, 128), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    starts, ends = [0, keys - 5000, 2**20 - 3, 2**24 - 2048] * 2, [keys, keys, 2**20 + 9000, 2**24 + 9000] * 2
    given = arguments(8, 1, starts, ends, accumulators=accumulators)
    OP.verify(given, kv=(k, torch.rand(keys, device="cuda")))


@accumulated
@pytest.mark.parametrize("keys", [7000, 40000])
def test_a_graph_takes_new_ranges_and_scores(keys, accumulators):
    """With 40000 keys, lists overflow in some replays and not in others, so the graph must contain the kernels for
    both."""

    def fresh(seed):
        starts = torch.randint(0, keys // 2, (2, 200))
        new = arguments(200, keys, starts[0], starts[1] + keys // 2, 300, accumulators, seed=seed)
        new["kv"][1].copy_(torch.rand(keys) * (torch.rand(keys) < (0.001 if seed % 2 else 1.0)))
        return new

    def with_scale(given):
        return given | {"scale": given["kv"][1]}

    given = fresh(1)
    renewals = (with_scale(fresh(seed)) for seed in range(4))
    for found in replayed(lambda: CASE.run(given), with_scale(given), renewals):
        require_two_ops(given, found)


@accumulated
def test_twenty_runs_are_identical(accumulators):
    given = arguments(500, 30000, 0, range(29500, 30000), accumulators=accumulators)
    assert_runs_have_the_same_bits(dsa.indexer_select, **given)


@pytest.mark.parametrize("keys", [TWO_OPS_KEYS, 40000, 131072])
def test_workspace(keys):
    given = arguments(2048, keys) | {"return_values": False}
    got = dsa.indexer_select(**given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = dsa.indexer_select(**given)
    assert torch.cuda.max_memory_allocated() - before <= got.nbytes + 2048 * 33 * 1024
