"""Scores over pages and selection in one launch beside the two ops by themselves, bit by bit."""

import functools
import itertools

import pytest
import torch

import dsa
from dsa.kernels.indexer.paged_select_plan import ENTRIES, ROW_WORDS, choose_config, sequences_of_launch
from dsa.kernels.indexer.select_limits import ZERO_WORDS
from dsa.testing import poison_free_memory
from tests.gpu.indexer.paged_keys import PagedKeys, int32
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits, captured, far_apart

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
        self.workspace = dsa.paged_indexer_select_workspace(len(self.weights), "cuda")

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
        """The op, over the case's workspace unless another is named."""
        options = {"workspace": self.workspace, **options}
        return dsa.paged_indexer_select(*self.arguments(lengths), columns, top_k, **options)

    def assert_zero_counts(self):
        """Every call leaves the workspace's counts at zero for the next one."""
        assert not self.workspace[:, :ZERO_WORDS].any()

    def check(self, top_k, columns=None, lengths=None, accumulators=torch.float32, both=True):
        """Indices and values are those of the two ops, by which this one is defined; and twice, over one workspace.

        both  with an own workspace of the op too, and positions as well as slots
        """
        columns = columns or max(1, int(self.lengths.max()))
        for slots in (False, True) if both else (True,):
            expected = self.expected(top_k, columns, lengths, accumulators, slots)
            poison_free_memory(mebibytes=64)
            options = {"accumulators": accumulators, "slots": slots}
            for _ in range(2):
                got = self.select(columns, top_k, lengths, return_values=True, **options)
                assert torch.equal(got[0], expected[0])
                assert torch.equal(got[1].view(torch.int32), expected[1].view(torch.int32))
            if both:
                assert torch.equal(self.select(columns, top_k, lengths, workspace=None, **options), expected[0])
        self.assert_zero_counts()


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
            for top_k in (1, 100, 2048):
                case.check(top_k, accumulators=accumulators)
        case.check(512, columns=5000)


@pytest.mark.parametrize("top_k", [1, 512, 2048])
@pytest.mark.parametrize("batch", [1, 2, 7, 31, 32])
def test_contexts_around_k(batch, top_k):
    for keys in (top_k - 1, top_k, top_k + 1, 100, 5000, 131072):
        Case([keys] * batch).check(top_k, both=batch < 32)


@pytest.mark.parametrize("batch", [1, 3, 8, 31, 32, 33, 40, 100])
def test_ragged_batches(batch):
    """Empty sequences, short and long ones, and more than a launch has room for."""
    for next_n, heads in ((1, 64), (2, 64), (4, 64), (3, 8)):
        lengths = torch.randint(0, 3000, (batch,))
        lengths[torch.rand(batch) < 0.3] = 0
        long = torch.rand(batch) < 0.2
        lengths[long] = torch.randint(0, 60000, (batch,))[long]
        case = Case(lengths.tolist(), next_n, heads)
        for top_k in (64, 2048):
            case.check(top_k, accumulators=HALF if next_n == 4 else torch.float32)


def test_random_mixtures():
    for i in range(60):
        batch, next_n = int(torch.randint(1, 41, ())), int(torch.randint(1, 5, ()))
        heads, top_k = (8, 64)[i % 2], int(torch.randint(1, 2049, ()))
        sizes = torch.tensor([0, 1, top_k - 1, top_k, top_k + 1, 100, 5000, 20000])
        lengths = sizes[torch.randint(len(sizes), (batch,))].tolist()
        case = Case(lengths, next_n, heads, page_size=(32, 64)[i // 2 % 2])
        columns = max(1, int(max(lengths) * (0.5 + torch.rand(()))))
        case.check(top_k, columns, accumulators=(torch.float32, HALF)[i // 4 % 2], both=i % 4 == 0)


def test_more_sequences_and_keys_than_a_launch_has_room_for():
    """Long sequences in several launches over the same rows of a workspace."""
    room = choose_config(64, 4, False).capacity(256, 4, False)
    assert sequences_of_launch(131072, room, dsa.num_sms("cuda")) < 16
    case = Case([131072, 0, 5, 131072, 100000, 2048, 131000, 60000] * 2, next_n=4)
    for accumulators in (torch.float32, HALF):
        case.check(2048, accumulators=accumulators)
    Case([1 << 20, 3, 1 << 20, 700000, 1 << 20]).check(2048)


@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (64, 2), (8, 4)])
def test_a_million_keys(heads, next_n):
    case = Case([1 << 20], next_n, heads)
    for top_k in (1, 512, 2048):
        case.check(top_k)
    # A long table, few keys: the CTAs that have none wait for nobody.
    for length in (0, 1, 5000):
        case.lengths.fill_(length)
        case.check(2048, columns=1 << 20)


def test_as_many_keys_as_there_is_room_for():
    case = Case([100], next_n=4)
    most = choose_config(64, 4, False).capacity(256, 4, False) * (dsa.num_sms("cuda") - 1)
    case.table = case.table[:, :1].expand(1, -(-most // 64) + 1).contiguous()
    with pytest.raises(ValueError, match=f"max_context_len: the kernel takes up to {most} keys of 4 queries"):
        case.select(most + 1, 100)
    case.check(100, columns=most)


# Scores of any shape, the same for all queries.
SHAPES = {
    "ascending": lambda n: torch.arange(1, n + 1),
    "descending": lambda n: torch.arange(n, 0, -1),
    "equal": torch.ones,
    "zeros": torch.zeros,
    "all minus infinity": lambda n: torch.full((n,), -torch.inf),
    "all infinity": lambda n: torch.full((n,), torch.inf),
    "half zeros": lambda n: torch.rand(n) * (torch.rand(n) < 0.5),
    "two values": lambda n: torch.arange(n) % 2 + 1,
    "zeros but for a few": lambda n: (torch.arange(n) % 1000 == 7).float(),
    "the largest last": lambda n: torch.arange(n) + (torch.arange(n) > n - 1500) * 1e6,
    "the largest first": lambda n: torch.arange(n) + (torch.arange(n) < 1500) * 1e6,
    "steps": lambda n: torch.arange(n) // 700 + 1,
    "a few levels": lambda n: torch.randint(1, 9, (n,)),
    "many levels": lambda n: torch.randint(1, n // 700 + 2, (n,)),
    "many sizes": lambda n: torch.rand(n).mul(60).exp2(),
    "both infinities": lambda n: torch.tensor([torch.inf, -torch.inf, 1.0, -1.0, 0.0, -0.0])[torch.arange(n) % 6],
    "both signs, many sizes": lambda n: torch.randn(n) * torch.rand(n).mul(60).exp2(),
    "both signs": torch.randn,
    "both zeros": lambda n: torch.tensor([0.0, -0.0])[torch.arange(n) % 2],
    "infinite": lambda n: torch.where(torch.arange(n) % 3 == 0, torch.inf, torch.rand(n)),
    "subnormal": lambda n: torch.randint(-1000, 1000, (n,)) * 2.0**-149,
    # What the first digit, the second and the third do not tell apart: all scores, or the middle ones.
    "one first digit": lambda n: 1 + torch.rand(n) / 9,
    "one second digit": lambda n: 1 + torch.rand(n) * 2.0**-14,
    "one second digit, few values": lambda n: 1 + torch.randint(5, (n,)) * 2.0**-22,
    "one third digit but for a few": lambda n: 1 + (torch.rand(n) < 0.01) * 2.0**-23,
    "as many as a list holds": lambda n: torch.where(torch.arange(n) < n - ENTRIES, 0.5, 1 + torch.rand(n) / 9),
    "one more than a list holds": lambda n: torch.where(torch.arange(n) < n - ENTRIES - 1, 0.5, 1 + torch.rand(n) / 9),
    "a list of equal ones": lambda n: torch.where(torch.arange(n) < n - ENTRIES, 0.5, 1.0),
    "NaN": lambda n: torch.where(torch.rand(n) < 0.3, torch.nan, torch.rand(n)),
    "NaN but for a few": lambda n: torch.where(torch.rand(n) < 0.97, torch.nan, torch.rand(n)),
    "all NaN": lambda n: torch.full((n,), torch.nan),
    "NaN and infinities": lambda n: torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(n) % 3],
}


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.25, -0.25])
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_of_any_shape(shape, sign):
    for lengths, next_n in (([50000, 3000, 2048, 9000], 1), ([30000], 1), ([40000, 0, 2050], 4)):
        case = Case(lengths, next_n, scales=SHAPES[shape], sign=sign)
        for top_k in (1, 500, 2048):
            case.check(top_k, accumulators=HALF if top_k == 500 else torch.float32)


def test_plateaus_of_many_sequences_and_long_ones():
    """All CTAs' scores are equal, or fall under few digits, and the counts of one digit are everybody's."""
    for scales in (SHAPES["equal"], SHAPES["half zeros"], SHAPES["one second digit"]):
        Case([20000] * 32, scales=scales).check(2048)
        Case([1 << 20], scales=scales).check(2048)


def test_queries_of_one_sequence_with_scores_of_their_own():
    """One has zeros alone, one negative scores, one large ones."""
    case = Case([30000, 5000], next_n=4)
    case.weights[0], case.weights[1] = 0.0, -case.weights[1].abs()
    case.weights[2] *= 1e30
    case.weights[7] = torch.inf
    for top_k in (100, 2048):
        case.check(top_k)


def test_scores_that_overflow():
    case = Case([5000, 100], next_n=2)
    case.q = torch.full_like(case.q.float(), 448.0).to(torch.float8_e4m3fn)
    case.weights[:] = torch.tensor([3e38, -3e38], device="cuda")[torch.arange(64) % 2]
    case.check(700)
    case.weights[0] = 3e38
    case.check(700)


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
    expected, got = case.expected(300, 100), case.select(2**31 - 1, 300, return_values=True, workspace=None)
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
@pytest.mark.parametrize("own", [True, False])
def test_a_graph_takes_new_lengths_keys_and_pages(length, own):
    """Also plateaus, of which the capture knew nothing, and such that are none behind these."""
    case = Case([length] * 6, next_n=2)
    options = {"slots": True, "return_values": True} | ({} if own else {"workspace": None})
    graph, got = captured(case.select, length, 600, **options)
    keys = len(case.slots)
    for i in range(6):
        case.lengths.copy_(torch.randint(0, length + 1, (6,)))
        scales = (torch.rand(keys) * (torch.rand(keys) < (0.001 if i % 2 else 1.0))).cuda()
        case.write(torch.randn(keys, 128, device="cuda").to(torch.float8_e4m3fn), scales)
        case.table.copy_(case.table.roll(1, 0))
        case.weights.normal_()
        for _ in range(3):
            graph.replay()
        assert all(map(torch.equal, got, case.expected(600, length, slots=True)))
        case.assert_zero_counts()


@pytest.mark.parametrize(
    ("lengths", "next_n", "scales"),
    [([131072], 1, None), ([5000, 1, 0, 777, 64], 2, None), ([60000] * 3, 1, torch.ones)],
)
def test_runs_are_identical(lengths, next_n, scales):
    case = Case(lengths, next_n, scales=scales)
    select = functools.partial(case.select, max(lengths), 2048, return_values=True)
    first = select()
    for _ in range(300):  # without a wait of the host
        got = select()
    assert_same_bits(got, first)
    assert_runs_have_the_same_bits(select)


def test_the_next_op_of_a_stream_has_the_results():
    """Producers and consumers on the same stream, without a wait of the host: what is launched behind sees all of it,
    and new keys and lengths are seen."""
    case = Case([40000, 9000], next_n=1)
    scales = [torch.rand(len(case.slots), device="cuda") for _ in range(8)]
    keys = torch.randn(len(case.slots), 128, device="cuda").to(torch.float8_e4m3fn)
    results = []
    for each in scales:
        case.write(keys, each)
        case.lengths.sub_(7)
        results.append(case.select(40000, 700).clone())
    case.lengths.add_(7 * len(scales))
    for each, got in zip(scales, results):
        case.write(keys, each)
        case.lengths.sub_(7)
        assert torch.equal(got, case.expected(700, 40000)[0])
    case.assert_zero_counts()


def replaying(graph, results):
    """A function that replays a graph and returns what the graph writes."""

    def replay():
        graph.replay()
        return results

    return replay


@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_at_once(graphs):
    """Calls or replays of graphs, each with a workspace of its own: CTAs of one wait for each other while those of the
    other take room."""
    cases, columns = [Case([60000, 500, 60000]), Case([131072], next_n=2)], (60000, 131072)
    streams = [torch.cuda.Stream() for _ in cases]
    expected = [case.expected(2048, n)[0] for case, n in zip(cases, columns)]
    launches = [functools.partial(case.select, n, 2048) for case, n in zip(cases, columns)]
    if graphs:
        launches = [replaying(*captured(launch)) for launch in launches]
    results = []
    for _ in range(200):
        for got in results:
            got.fill_(-2)  # a replay writes to the same memory as the last one
        torch.cuda.synchronize()
        results = []
        for launch, stream in zip(launches, streams):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    got = launch()
            results.append(got)
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))
    for case in cases:
        case.assert_zero_counts()


def test_beside_a_kernel_that_holds_multiprocessors():
    """Its CTAs start late, and others wait for them."""
    case = Case([131072, 131072])
    expected = case.expected(2048, 131072)[0]
    a, side = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            for _ in range(4):
                a @ a
        got = case.select(131072, 2048)
        torch.cuda.synchronize()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("number", [-1, 2**31 - 1, -(2**31), 1, "random"])
def test_a_workspace_that_is_not_zero_does_no_harm(number):
    """No result is right, but nothing beside it is written, and zeros make it as good as new."""
    case = Case([30000, 5000, 100], next_n=2)
    rows = len(case.workspace)
    wide = torch.full((rows + 8, ROW_WORDS), 77, dtype=torch.int32, device="cuda")
    workspace = wide[4:-4]
    if number == "random":
        workspace.copy_(torch.randint(-(2**31), 2**31 - 1, workspace.shape, dtype=torch.int32))
    else:
        workspace.fill_(number)
    got = case.select(30000, 300, return_values=True, workspace=workspace)
    torch.cuda.synchronize()
    assert got[0].shape == (6, 300)
    assert (wide[:4] == 77).all() and (wide[-4:] == 77).all()
    case.workspace = workspace.zero_()
    case.check(300)


def test_memory_beside_the_results():
    """A workspace of a launch's queries, and none where one is given."""
    case = Case([20000] * 8)
    for workspace, most in ((None, 8 * ROW_WORDS * 4), (case.workspace, 0)):
        got = case.select(20000, 2048, workspace=workspace)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = case.select(20000, 2048, workspace=workspace)
        assert torch.cuda.max_memory_allocated() - before <= got.nbytes + most
