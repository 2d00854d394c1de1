"""One call gives the bits of the two ops, scores over pages and selection."""

import itertools

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.indexer.paged_keys import PagedKeys, int32
from tests.gpu.op_checks import assert_runs_have_the_same_bits, captured, far_apart

HALF = torch.float16


class Case(PagedKeys):
    """scales: of a sequence's keys, a function of their number. Its scores are these: all keys and queries are the
    same."""

    def __init__(self, lengths, next_n=1, heads=64, scales=None, sign=1.0, dim=128, **options):
        super().__init__(lengths, next_n, heads, dim, **options)
        if scales is not None:
            one = torch.zeros(dim, device="cuda")
            one[0] = 1.0
            self.q = one.expand(self.q.shape).to(torch.float8_e4m3fn).contiguous()
            self.weights.zero_()
            self.weights[:, 0] = sign
            keys = one.expand(len(self.slots), dim).to(torch.float8_e4m3fn)
            self.write(keys, torch.cat([scales(n).float() for n in lengths]).cuda())

    def write(self, keys, scales):
        if len(self.slots):
            dsa.write_indexer_cache(keys.contiguous(), scales, self.cache, self.slots)

    def arguments(self, lengths=None):
        return self.q, self.cache, self.weights, self.lengths if lengths is None else lengths, self.table

    def visible(self, columns, lengths=None):
        """How many keys each query sees."""
        lengths = self.lengths if lengths is None else lengths
        if lengths.dim() == 1:
            lengths = lengths[:, None].long() + torch.arange(1 - self.next_n, 1, device="cuda")
        return lengths.clamp(0, min(columns, self.table.shape[1] * self.cache.shape[1])).int().flatten()

    def expected(self, top_k, columns, lengths=None, accumulators=torch.float32, slots=False):
        """Of the two ops."""
        scores = dsa.fp8_paged_mqa_logits(*self.arguments(lengths), None, columns, accumulators=accumulators)
        paging = {}
        if slots:
            sequences = torch.arange(len(self.q), dtype=torch.int32, device="cuda").repeat_interleave(self.next_n)
            paging = {"block_table": self.table, "page_size": self.cache.shape[1], "row_to_seq": sequences}
        indices, values = dsa.topk_indices(
            scores, top_k, lengths=self.visible(columns, lengths), return_values=True, **paging
        )
        return indices, values + 0.0  # the sign of a zero is not a value's

    def select(self, columns, top_k, lengths=None, **options):
        """The op."""
        return dsa.paged_indexer_select(*self.arguments(lengths), columns, top_k, **options)

    def check(self, top_k, columns=None, lengths=None, accumulators=torch.float32):
        """Indices and values are those of the two ops, by which this one is defined: slots, and positions too."""
        columns = columns or max(1, int(self.lengths.max()))
        for slots in (False, True):
            expected = self.expected(top_k, columns, lengths, accumulators, slots)
            poison_free_memory(mebibytes=64)
            options = {"accumulators": accumulators, "slots": slots}
            got = self.select(columns, top_k, lengths, return_values=True, **options)
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1].view(torch.int32), expected[1].view(torch.int32))
            assert torch.equal(self.select(columns, top_k, lengths, **options), expected[0])


@pytest.mark.parametrize(
    ("heads", "dim", "next_n", "page_size"),
    [
        *itertools.product((8, 16, 32, 64), (128,), (1, 2, 3, 4), (32, 64)),
        *itertools.product((64,), (32, 64), (1, 2, 3, 4), (64,)),
    ],
)
def test_every_shape(heads, dim, next_n, page_size):
    for lengths in ([0, 1, 63, 64, 65, 257, 1000, 0, 0, 5, 4097, 2], [20000], [0]):
        case = Case(lengths, next_n, heads, dim=dim, page_size=page_size)
        for accumulators in (torch.float32, HALF):
            for top_k in (1, 100, 2048, 4096):
                case.check(top_k, accumulators=accumulators)
        case.check(512, columns=5000)


@pytest.mark.parametrize("batch", [1, 3, 33, 100])
def test_ragged_batches(batch):
    """Empty sequences, short and long ones."""
    for next_n, heads in ((1, 64), (2, 64), (4, 64), (3, 8)):
        lengths = torch.randint(0, 3000, (batch,))
        lengths[torch.rand(batch) < 0.3] = 0
        long = torch.rand(batch) < 0.2
        lengths[long] = torch.randint(0, 60000, (batch,))[long]
        case = Case(lengths.tolist(), next_n, heads)
        for top_k in (64, 2048):
            case.check(top_k, accumulators=HALF if next_n == 4 else torch.float32)


def test_a_million_keys():
    case = Case([1 << 20], 2)
    for length in (1 << 20, 0, 5000):
        case.lengths.fill_(length)
        case.check(2048, columns=1 << 20)


def test_equal_scores_and_zeros():
    for scales in (torch.ones, torch.zeros, lambda n: torch.rand(n) * (torch.rand(n) < 0.001)):
        for sign in (1.0, -1.0):
            Case([50000, 3000, 2048], scales=scales, sign=sign).check(2048)


def test_nan_in_keys_and_scales():
    case = Case([200, 4000], next_n=2)
    raw, page = case.cache.view(len(case.cache), -1), case.table.tolist()
    raw[page[0][1], 13 * 128] = 0x7F  # key 77
    raw[page[1][2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of key 150
    case.check(200)
    indices = case.select(4000, 200).tolist()
    assert all(77 not in row and len(set(row) - {-1}) == n for row, n in zip(indices[:2], (198, 199)))
    case.q.view(torch.uint8)[1, 1, 3, 5] = 0x7F  # a query: all of its scores
    case.check(200)
    assert (case.select(4000, 200)[3] == -1).all()


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_a_length_for_every_query(next_n):
    case = Case([5, 700, 64, 1, 30000], next_n)
    lengths = torch.stack([int32([0, 300, 64, 1, 7]), *[case.lengths] * (next_n - 1)], 1)
    case.check(256, 30000, lengths)
    case.check(256, 30000, lengths.flip(1).contiguous())
    wide = torch.full((5, 9), 7, dtype=torch.int32, device="cuda")
    wide[:, :next_n] = lengths
    case.check(256, 30000, wide[:, :next_n])


def test_columns_fewer_than_keys_and_a_table_too_short():
    case = Case([1000, 500, 70], 2)
    case.check(100, columns=333)
    case.check(500, columns=333)
    for pages in (3, 1):
        case.table = case.table[:, :pages].clone()
        for columns in (900, 70, 64):
            case.check(300, columns=columns)
    expected, got = case.expected(300, 100), case.select(2**31 - 1, 300, return_values=True)
    assert all(map(torch.equal, got, expected))


def test_lengths_of_any_numbers():
    garbage = [-(2**31), 2**31 - 1, -1, 0, 1, 64, 299, 300, 301, 2**30, -(2**31) + 2]
    for next_n in (1, 4):
        case = Case([300] * len(garbage), next_n, heads=8)
        case.check(33, 300, int32(garbage))
        case.check(400, 300, int32(garbage))
        case.check(33, 300, int32([garbage] * next_n).T.contiguous().roll(1, 0))


def test_pages_outside_the_cache():
    """Their keys score -inf, and are selected where too few others are there."""
    for page_size in (32, 64):
        case = Case([1000, 500], 2, page_size=page_size)
        for index, page in ((0, -1), (3, len(case.cache)), (6, 2**31 - 1), (7, -(2**31))):
            case.table[0, index] = page
        for top_k in (100, 900, 2000):
            case.check(top_k)
    case.table.fill_(-1)
    case.check(300)


def test_cache_beyond_2_to_31_bytes():
    case = Case([3000, 1000])
    case.cache = far_apart(case.cache)
    case.check(512)


def test_strided_weights_and_tables():
    case = Case([60, 700, 64, 1], spare_pages=0)
    wide_table = torch.full((4, 3 * case.table.shape[1]), 7, dtype=torch.int32, device="cuda")
    wide_table[:, 1 : 1 + case.table.shape[1]] = case.table
    case.table = wide_table[:, 1 : 1 + case.table.shape[1]]
    case.lengths = int32([60, 9, 700, 9, 64, 9, 1, 9])[::2]
    for columns in (3 * 64, 3 * 64 + 1):
        case.weights = torch.randn(4, columns, device="cuda")[:, 64:128]
        case.check(70)
    Case([50], spare_pages=0).check(70)


@pytest.mark.parametrize("length", [700, 40000])
def test_a_graph_takes_new_lengths_keys_and_pages(length):
    case = Case([length] * 6, next_n=2)
    graph, got = captured(case.select, length, 600, slots=True, return_values=True)
    keys = len(case.slots)
    for i in range(6):
        case.lengths.copy_(torch.randint(0, length + 1, (6,)))
        scales = (torch.rand(keys) * (torch.rand(keys) < (0.001 if i % 2 else 1.0))).cuda()
        case.write(torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn), scales)
        case.table.copy_(case.table.roll(1, 0))
        case.weights.normal_()
        graph.replay()
        assert all(map(torch.equal, got, case.expected(600, length, slots=True)))


def test_runs_are_identical():
    case = Case([5000, 1, 0, 777, 60000], 2)
    assert_runs_have_the_same_bits(lambda: case.select(60000, 2048, return_values=True))
