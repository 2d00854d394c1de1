"""The compressor's kernel beside the reference: entries as the cache has them, and the state bit for bit."""

import pytest
import torch

import dsa
from dsa.reference.cache import compressed_kv as reference
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.cache.poisoned_caches import poisoned_cache
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits, captured

PAGES, PAGE, STATE_SLOTS = 40, 64, 9
# channels, tokens of a block, overlap; the cache's layout
KINDS = [
    (512, 4, True, "bfloat16"),
    (512, 4, True, "v4"),
    (512, 128, False, "bfloat16"),
    (512, 128, False, "v4"),
    (128, 4, True, "bfloat16"),
    (128, 4, True, "index"),
    (512, 4, True, "float32"),
    (512, 128, False, "float16"),
]
DTYPES = [torch.float32, torch.bfloat16]


def make_cache(layout, d):
    return poisoned_cache(layout, d, PAGES, PAGE)


class Case:
    """Sequences of these lengths so far, in random state slots; a state that is NaN where nothing has been."""

    def __init__(self, kind, dtype, sequences, spare_rows=0):
        self.d, self.m, self.overlap, self.layout = kind
        self.dtype, self.sequences = dtype, sequences
        c = 2 * self.d if self.overlap else self.d
        self.c, self.ape = c, torch.randn(self.m, c, device="cuda")
        self.weight = torch.rand(self.d, device="cuda") + 0.5
        self.state_slots = torch.randperm(STATE_SLOTS, device="cuda")[:sequences].int()
        rows = (2 * self.m if self.overlap else self.m) + spare_rows
        self.state = torch.full((STATE_SLOTS, rows, 2, c), torch.nan, device="cuda")
        self.done = [0] * sequences
        self.cache = make_cache(self.layout, self.d)
        self.free = torch.randperm(PAGES * PAGE, device="cuda").tolist()

    def tokens(self, new):
        """Arguments for so many new tokens of each sequence."""
        total = sum(new)
        slots = torch.full((total,), -1, device="cuda")
        row = 0
        for start, n in zip(self.done, new):
            for i in range(n):
                if (start + i + 1) % self.m == 0:
                    slots[row + i] = self.free.pop()
            row += n
        kv, gate = (torch.randn(total, self.c, device="cuda").to(self.dtype) for _ in range(2))
        angles = 10 * torch.randn(total, 32, device="cuda")
        cu = torch.tensor([0, *new], device="cuda").cumsum(0).int()
        starts = torch.tensor(self.done, dtype=torch.int32, device="cuda")
        self.done = [a + b for a, b in zip(self.done, new)]
        return kv, 3 * gate, angles.cos(), angles.sin(), slots, cu, starts

    def call(self, op, cache, state, kv, gate, cos, sin, slots, cu, starts):
        op(
            *(kv, gate, self.ape, self.weight, cos, sin, cache, slots, cu, starts, state, self.state_slots),
            overlap=self.overlap,
        )

    def written(self, *arguments):
        """The entries and the state after a call with these tokens; this case's own stay as they are."""
        cache, state = make_cache(self.layout, self.d), self.state.clone()
        self.call(dsa.write_compressed_kv, cache, state, *arguments)
        slots = arguments[4]
        return self.raw(cache, slots[slots >= 0]), state.view(torch.int32)

    def check(self, new, record_error=None):
        arguments = self.tokens(new)
        cache, state = self.cache.clone(), self.state.clone()
        if self.layout == "v4":
            cache = make_cache("v4", self.d)
            cache.copy_(self.cache)
        poison_free_memory(mebibytes=64)
        self.call(dsa.write_compressed_kv, self.cache, self.state, *arguments)
        self.call(reference.write_compressed_kv, cache, state, *arguments)
        assert torch.equal(self.state.view(torch.int32), state.view(torch.int32))
        every = torch.arange(PAGES * PAGE, device="cuda")
        written = arguments[4][arguments[4] >= 0]
        others = every[~torch.isin(every, written)]
        got, expected = self.read(self.cache, written), self.read(cache, written)
        kept, before = self.raw(self.cache, others), self.raw(cache, others)
        assert torch.equal(kept, before)
        if len(written):
            # A number may round to its neighbour: of e4m3 a sixteenth away.
            rel = 1 / 8 if self.layout in ("v4", "index") else 2.01 / 128
            error = assert_close("entries", got, expected, abs_tol=2e-2, rel_tol=rel, cos_tol=2e-5)
            if record_error:
                record_error(error)

    def read(self, cache, slots):
        if self.layout == "index":
            k, scale = dsa.read_indexer_cache(cache, slots)
            return k.float() * scale[:, None]
        return dsa.read_kv_cache(cache, slots, dtype=torch.float32)

    def raw(self, cache, slots):
        """What the bytes of these slots are."""
        if self.layout == "index":
            k, scale = dsa.read_indexer_cache(cache, slots)
            return torch.cat((k.view(torch.uint8), scale[:, None].view(torch.uint8)), 1)
        if self.layout == "v4":
            page, offset = slots // PAGE, slots % PAGE
            rows = cache.as_strided((PAGES, PAGE, 576), (cache.stride(0), 576, 1))[page, offset]
            scales = cache.as_strided((PAGES, PAGE, 8), (cache.stride(0), 8, 1), 576 * PAGE)
            return torch.cat((rows, scales[page, offset]), 1)
        return cache.view(-1, self.d)[slots].view(torch.int16)


CHUNKS = [[300, 5, 131], [1, 1, 1], [3, 0, 260], [0, 123, 1], *[[1, 1, 1]] * 6, [130, 128, 2]]


@pytest.mark.parametrize("chunks", [CHUNKS, [[5001], [2047]]], ids=["chunks and single tokens", "a long one"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunks_and_single_tokens(kind, dtype, chunks, record_error):
    case = Case(kind, dtype, len(chunks[0]))
    for new in chunks:
        case.check(new, record_error)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tokens_that_are_taken_back(kind, record_error):
    """The last ones of each pass, in a state that has rows for them."""
    case = Case(kind, torch.bfloat16, 3, spare_rows=2)
    case.check([300, 7, 131], record_error)
    for back in (3, 1, 2, 0, 3, 3):
        case.check([4, 4, 4], record_error)
        case.done = [done - back for done in case.done]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_many_sequences(kind, record_error):
    """More sequences than a warp has lanes; some of them without new tokens."""
    case = Case(kind, torch.float32, 9)
    case.state_slots = torch.randperm(70, device="cuda").int()
    case.state = torch.full((70, *case.state.shape[1:]), torch.nan, device="cuda")
    case.done = [0] * 70
    sizes = torch.randint(0, 12, (70,)).tolist()
    for new in (sizes, [1] * 70, [2] * 70):
        case.check(new, record_error)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_extremes(kind):
    """One token's gate is so large that all other softmax weights underflow to 0: the entry is that token's."""
    case = Case(kind, torch.float32, 1)
    kv, gate, *rest = case.tokens([2 * case.m])
    gate[:] = 0
    case.ape[:] = 0
    gate[case.m + 1] = 1e4
    case.call(dsa.write_compressed_kv, case.cache, case.state, kv, gate, *rest)
    last = rest[2][-1:]
    v = kv[case.m + 1, -case.d :]
    expected = v * torch.rsqrt(v.square().mean() + 1e-6) * case.weight
    got = case.read(case.cache, last)[0]
    if case.layout != "index":
        assert_close("entry", got[: case.d - 64], expected[: case.d - 64], abs_tol=2e-2, rel_tol=1 / 8, cos_tol=2e-3)
    assert got.isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_one_projection(kind, dtype):
    """kv and gate side by side, gate first: the bits are those of tensors of their own."""
    case = Case(kind, dtype, 3)
    case.check([130, 7, 2])
    kv, gate, *rest = case.tokens([3, 130, 1])
    gate_half, kv_half = torch.cat((gate, kv), 1).split(case.c, 1)
    assert_same_bits(case.written(kv_half, gate_half, *rest), case.written(kv, gate, *rest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_entry_does_not_depend_on_its_pass(kind, dtype):
    """Whole prompts, parts of them, drafts and single tokens, beside another sequence or alone: the same bits of the
    entries and of the state."""
    case = Case(kind, dtype, 2)
    case.state[:] = 0
    length = 300 if case.m == 128 else 75
    kv, gate, cos, sin, slots, _, _ = case.tokens([length, length])
    cu_of = {2: lambda n: [0, n, 2 * n], 1: lambda n: [0, n]}
    found = []
    for step, together in ((length, 2), (length, 1), (128, 2), (5, 2), (1, 2), (1, 1)):
        cache, state = make_cache(case.layout, case.d), case.state.clone()
        for low in range(0, length, step):
            high = min(low + step, length)
            for first in range(0, 2, together):
                sequences = range(first, first + together)
                rows = torch.cat([torch.arange(low, high) + b * length for b in sequences]).cuda()
                cu = torch.tensor(cu_of[together](high - low), dtype=torch.int32, device="cuda")
                starts = torch.full((together,), low, dtype=torch.int32, device="cuda")
                dsa.write_compressed_kv(
                    *(kv[rows], gate[rows], case.ape, case.weight, cos[rows], sin[rows], cache, slots[rows], cu),
                    *(starts, state, case.state_slots[first : first + together].contiguous()),
                    overlap=case.overlap,
                )
        found.append((case.raw(cache, slots[slots >= 0]), state.view(torch.int32)))
    for entries, state in found[1:]:
        assert torch.equal(entries, found[0][0]) and torch.equal(state, found[0][1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_runs_are_bit_identical(kind):
    case = Case(kind, torch.bfloat16, 4)
    case.check([200, 7, 130, 64])
    assert_runs_have_the_same_bits(case.written, *case.tokens([70, 1, 2, 300]), times=10)


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=str)
def test_graph_replay_with_new_positions(kind):
    """Single tokens: the same launch ends blocks or does not, as the lengths say."""
    case = Case(kind, torch.bfloat16, 5)
    case.check([5, 1, 2, 3, 4])
    held = [x.clone() for x in case.tokens([1] * 5)]
    case.done = [n - 1 for n in case.done]
    state = case.state.clone()
    graph, _ = captured(case.call, dsa.write_compressed_kv, case.cache, case.state, *held)
    case.state.copy_(state)
    for _ in range(9):
        arguments = case.tokens([1] * 5)
        expected = case.written(*arguments)
        for target, value in zip(held, arguments):
            target.copy_(value)
        graph.replay()
        written = arguments[4][arguments[4] >= 0]
        assert_same_bits((case.raw(case.cache, written), case.state.view(torch.int32)), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_lies_outside_is_not_touched(kind):
    """Slots beyond the cache, or a cache without pages; state slots beyond the state; lengths that go backwards."""
    case = Case(kind, torch.float32, 3)
    *given, slots, cu, starts = case.tokens([140, 9, 130])
    every = torch.arange(PAGES * PAGE, device="cuda")
    entries, state = case.raw(case.cache, every), case.state.clone()
    expected = state.clone()
    case.call(reference.write_compressed_kv, case.cache[:0], expected, *given, slots * 0 - 1, cu, starts)
    slots[slots >= 0] = PAGES * PAGE + 5
    for cache in (case.cache, case.cache[:0]):
        case.state.copy_(state)
        case.call(dsa.write_compressed_kv, cache, case.state, *given, slots, cu, starts)
        assert_same_bits(case.state, expected)
    case.state.copy_(state)
    case.state_slots = torch.tensor([-1, STATE_SLOTS, 2**31 - 1], dtype=torch.int32, device="cuda")
    case.call(dsa.write_compressed_kv, case.cache, case.state, *given, slots, cu, starts)
    assert_same_bits(case.state, state)
    case.state_slots = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
    for wrong in ([0, 200, 100, 279], [-5, 10**9, -3, 7], [279, 0, 0, 0]):
        cu = torch.tensor(wrong, dtype=torch.int32, device="cuda")
        case.call(dsa.write_compressed_kv, case.cache, case.state, *given, slots, cu, starts - 7)
    assert_same_bits(case.raw(case.cache, every), entries)
