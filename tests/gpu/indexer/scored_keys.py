"""Tests that every op that scores the indexer's keys must pass: KeysInOnePiece for contiguous keys, KeysInPages for
paged keys. The test file of each op subclasses one of these classes and defines a fixture `op`, which returns an Op."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from dsa.cases.case import Case, Given
from dsa.testing import poison_free_memory
from tests.gpu.attention import int32, replayed

FP32, FP16 = torch.float32, torch.float16
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
RANGES = "cu_seq_len_k_start", "cu_seq_len_k_end"
accumulated = pytest.mark.parametrize("accumulators", [FP32, FP16], ids=str)


@dataclass(frozen=True)
class Op:
    """A case of an op, a check of the results, and options of the call.

    check: (arguments, results) -> the largest error, or None if equal bits are required. options: override arguments
    that `case` makes
    """

    case: Case
    check: Callable[..., float | None]
    options: Given = field(default_factory=dict)

    def arguments(self, **sizes):
        sizes = {"heads": 64, "dim": 128, "accumulators": FP32} | sizes
        return self.case.arguments("cuda", **sizes) | self.options

    def pages(self, lengths, kind, **sizes):
        """Return arguments with sequences of these lengths. With num_sms 0 schedule_meta is None, so the op itself
        divides the keys among SMs. kind: (queries per sequence, accumulators)"""
        next_n, accumulators = kind
        sizes = {"page_size": 64, "columns": max(1, *lengths), "num_sms": 0} | sizes
        return self.arguments(lengths=tuple(lengths), next_n=next_n, accumulators=accumulators, **sizes)

    def verify(self, given, record_error=None, **changes):
        poison_free_memory(mebibytes=64)
        error = self.check(given | changes, self.case.run(given | changes))
        if record_error and error is not None:
            record_error(error)


def packed(lengths):
    """Return (starts, ends) of the key ranges of causal queries, for packed sequences of these lengths."""
    starts = torch.tensor([first for n, first in zip(lengths, torch.tensor([0, *lengths]).cumsum(0)) for _ in range(n)])
    return starts, torch.arange(1, len(starts) + 1)


def any_numbers(keys):
    return zip(*product([INT_MIN, INT_MAX, -1, 0, 1, 64, keys - 1, keys, keys + 1, 2**30], repeat=2))


# name -> (number of keys, (starts, ends) of the queries' key ranges)
OF_ONE_PIECE = {
    # All queries are in one block. Its ranges are far apart, with key tiles in between that no query sees.
    "far apart in one block": (10000, ([9000, 9100, 9200, 9300, 0, 9990, 0, 9990], [10, 20, 0, 64, 1, 10000, 5, 9991])),
    "packed sequences": (636, packed([1, 63, 64, 65, 440, 3])),
    "beyond the columns": (1000, ([0, 0, 5, 990, 300, 999], [1000, 64, 900, 1000, 2000, 1000])),
    "any numbers": (300, [*any_numbers(300)]),
    "any numbers, many keys": (20000, [*any_numbers(20000)]),
}
CAUSAL = [(301, 1000), (301, 5000), (301, 20000), (70, 70000)]
RANDOM = [(1, 1), (1, 70000), (2, 63), (5, 64), (3, 65), (700, 129), (64, 9000), (600, 8193), (9, 200001)]


class KeysInOnePiece:
    @accumulated
    @pytest.mark.parametrize("dim", [32, 64, 128])
    @pytest.mark.parametrize("heads", [8, 16, 32, 64])
    @pytest.mark.parametrize(("queries", "keys"), CAUSAL)
    def test_causal_ranges_are_right(self, op, queries, keys, heads, dim, accumulators, record_error):
        sizes = {"queries": queries, "keys": keys, "window": keys * 8 // 9, "heads": heads, "dim": dim}
        op.verify(op.arguments(**sizes, accumulators=accumulators), record_error)

    @accumulated
    @pytest.mark.parametrize("heads", [8, 64])
    @pytest.mark.parametrize(("queries", "keys"), RANDOM)
    def test_random_ranges_are_right(self, op, queries, keys, heads, accumulators, record_error):
        op.verify(op.arguments(queries=queries, keys=keys, heads=heads, accumulators=accumulators), record_error)

    @accumulated
    @pytest.mark.parametrize("heads", [8, 64])
    @pytest.mark.parametrize(("keys", "ranges"), OF_ONE_PIECE.values(), ids=list(OF_ONE_PIECE))
    def test_special_ranges_are_right(self, op, keys, ranges, heads, accumulators):
        starts, ends = map(int32, ranges)
        given = op.arguments(queries=len(starts), keys=keys, heads=heads, accumulators=accumulators)
        op.verify(given | dict(zip(RANGES, (starts, ends))))


# (queries per sequence, accumulators). With one or two queries per sequence the accumulators are always fp32.
KINDS = [*((n, FP32) for n in (1, 2, 3, 4)), (3, FP16), (4, FP16)]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
SHAPES = [*product((8, 16, 32, 64), (128,), (32, 64)), *product((8, 16, 32, 64), (32, 64), (64,))]
MIXED = (0, 1, 31, 32, 33, 63, 64, 65, 257, 1000, 0, 0, 5, 4097, 2)
SPECIAL = [
    *(((0,), (1, FP32), {}), ((0,) * 5, (2, FP32), {}), ((50,), (1, FP32), {"spare_pages": 0})),
    *(((1 << 20,), (n, FP32), {}) for n in (1, 2)),
    ((1 << 20, 3, 1 << 18), (2, FP32), {"heads": 8, "dim": 32}),
    ((1 << 18, 3, 1 << 16), (4, FP16), {}),
]


class KeysInPages:
    @by_kind
    @pytest.mark.parametrize(("heads", "dim", "page_size"), SHAPES)
    @pytest.mark.parametrize("lengths", [MIXED, (20000,)], ids=len)
    def test_shapes_are_right(self, op, lengths, heads, dim, page_size, kind, record_error):
        op.verify(op.pages(lengths, kind, heads=heads, dim=dim, page_size=page_size), record_error)

    @pytest.mark.parametrize(("lengths", "kind", "sizes"), SPECIAL, ids=str)
    def test_long_and_empty_sequences_are_right(self, op, lengths, kind, sizes, record_error):
        op.verify(op.pages(lengths, kind, **sizes), record_error)

    @by_kind
    @pytest.mark.parametrize(
        ("batch", "longest"), [*((n, 60000) for n in (1, 3, 33, 100)), *((n, 600) for n in (31, 700, 4096))]
    )
    def test_ragged_batches_are_right(self, op, batch, longest, kind, record_error):
        """With fp16 accumulators, some warpgroups scale the queries of a work tile while others still compute the
        previous work tile. If these warpgroups raced, scores would be wrong."""
        lengths = (torch.rand(batch) ** 3 * longest * (torch.rand(batch) < 0.7)).int()
        op.verify(op.pages(lengths.tolist(), kind), record_error)

    @by_kind
    def test_a_length_for_every_query(self, op, kind, record_error):
        given, next_n = op.pages((5, 700, 64, 1, 30000), kind), kind[0]
        lengths = torch.stack([int32([0, 300, 64, 1, 7]), *[given["context_lens"]] * (next_n - 1)], 1)
        for lens in (lengths, lengths.flip(1)):
            op.verify(given, record_error, context_lens=lens)

    @by_kind
    def test_lengths_of_any_numbers(self, op, kind):
        garbage = [INT_MIN, INT_MAX, -1, 0, 1, 64, 319, 320, 321, 2**30, INT_MIN + 2]
        given = op.pages([320] * len(garbage), kind, heads=8)  # exactly five pages
        op.verify(given, context_lens=int32(garbage))
        op.verify(given, context_lens=int32([garbage] * kind[0]).T.contiguous().roll(1, 0))

    @pytest.mark.parametrize("columns", [900, 333, 70, 64])
    @pytest.mark.parametrize("pages", [17, 3, 1])
    def test_columns_fewer_than_keys_and_a_table_too_short(self, op, pages, columns):
        given = op.pages((1000, 500, 70), KINDS[1])
        op.verify(given, block_table=given["block_table"][:, :pages].clone(), max_context_len=columns)

    @pytest.mark.parametrize("page_size", [32, 64])
    def test_keys_of_pages_outside_the_cache_score_minus_infinity(self, op, page_size):
        given = op.pages((1000, 500), KINDS[1], page_size=page_size)
        table = given["block_table"]
        table[0, [0, 3, 6, 7]] = int32([-1, len(given["kv_cache"]), INT_MAX, INT_MIN])
        op.verify(given)
        op.verify(given, block_table=torch.full_like(table, -1))

    @by_kind
    @pytest.mark.parametrize(("length", "per_query"), [(700, False), (2000, True), (40000, False)])
    def test_a_graph_takes_new_lengths_keys_and_pages(self, op, length, per_query, kind):
        def fresh(seed):
            new = op.pages((length,) * 6, kind, seed=seed, per_query=per_query)
            scales = new["kv_cache"].view(len(new["kv_cache"]), -1)[:, 64 * 128 :].view(FP32)
            scales *= torch.rand_like(scales) < (0.001 if seed % 2 else 1.0)
            new["context_lens"].random_(0, length + 1).mul_(seed < 5)
            return new

        given = fresh(0)
        for found in replayed(lambda: op.case.run(given), given, map(fresh, range(1, 6))):
            op.check(given, found)
