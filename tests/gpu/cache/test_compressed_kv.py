"""The compressor: all kinds of entries and caches, chunks, single tokens, extremes, and that passes do not matter."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import slot_bytes
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured

CASE = cases_of("compressed_kv")[2]
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
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# New tokens of each sequence, and those before them.
PASSES = [
    ([300, 5, 131], [0, 0, 0]),
    ([1, 1, 1], [300, 5, 131]),
    ([3, 0, 260], [301, 6, 132]),
    ([0, 123, 1], [304, 6, 392]),
    *(([1, 1, 1], [304 + i, 129 + i, 393 + i]) for i in range(6)),
    ([130, 128, 2], [310, 135, 399]),
    ([5001], [0]),
    ([2047], [5001]),
]


def sizes_of(kind, lengths, starts, **sizes):
    d, m, overlap, layout = kind
    return {"d": d, "m": m, "overlap": overlap, "layout": layout, "lengths": lengths, "starts": starts, **sizes}


@by_dtype
@by_kind
def test_chunks_and_single_tokens(kind, dtype, record_error):
    for seed, (lengths, starts) in enumerate(PASSES):
        poison_free_memory(mebibytes=64)
        record_error(CASE.verify("cuda", seed, **sizes_of(kind, lengths, starts, dtype=dtype)))


@by_kind
def test_states_with_spare_rows(kind, record_error):
    """Passes go on from any of the last three tokens, for which the state has two more rows."""
    for back in (0, 1, 2, 3):
        starts = [304 - back, 11 - back, 135 - back]
        record_error(CASE.verify("cuda", back, **sizes_of(kind, [4, 4, 4], starts, spare=2)))


@by_kind
def test_many_sequences(kind, record_error):
    """More sequences than a warp has lanes; some of them without new tokens."""
    sizes = torch.randint(0, 12, (70,)).tolist()
    for seed, (lengths, starts) in enumerate(((sizes, [0] * 70), ([1] * 70, sizes), ([2] * 70, sizes))):
        record_error(CASE.verify("cuda", seed, **sizes_of(kind, lengths, starts, dtype=torch.float32)))


def checked(given):
    before = {name: given[name].clone() for name in CASE.written}
    CASE.check(given | before, CASE.results(given))


@by_kind
def test_one_token_takes_all_the_weight(kind):
    """One token's gate is so large that all other softmax weights underflow to 0."""
    m = kind[1]
    given = CASE.arguments("cuda", **sizes_of(kind, [2 * m], [0], dtype=torch.float32))
    given["gate"].zero_()
    given["ape"].zero_()
    given["gate"][m + 1] = 1e4
    checked(given)


@by_kind
@by_dtype
def test_halves_of_one_projection(kind, dtype):
    """kv and gate side by side, gate first: the bits are those of separate tensors."""
    given, other = (CASE.arguments("cuda", **sizes_of(kind, [3, 130, 1], [130, 7, 2], dtype=dtype)) for _ in range(2))
    gate, kv = torch.cat((other["gate"], other["kv"]), 1).chunk(2, 1)
    assert_same_bits(CASE.results(other | {"kv": kv, "gate": gate}), CASE.results(given))


@by_dtype
@by_kind
def test_an_entry_does_not_depend_on_its_pass(kind, dtype):
    """Whole prompts, parts of them, drafts and single tokens, with another sequence or alone: the same bits of the
    entries and of the state."""
    length = 300 if kind[1] == 128 else 75
    found = []
    for step, together in ((length, 2), (length, 1), (128, 2), (5, 2), (1, 2), (1, 1)):
        given = CASE.arguments("cuda", **sizes_of(kind, [length] * 2, [0] * 2, dtype=dtype))
        given["state"].zero_()
        for low in range(0, length, step):
            new = range(low, min(low + step, length))
            for first in range(0, 2, together):
                rows = torch.tensor([b * length + t for b in range(first, first + together) for t in new])
                part = {name: given[name][rows.cuda()] for name in ("kv", "gate", "cos", "sin", "slots")}
                part["cu_seqlens"] = given["cu_seqlens"][: together + 1] // length * len(new)
                part["starts"] = torch.full((together,), low, dtype=torch.int32, device="cuda")
                part["state_slots"] = given["state_slots"][first : first + together].clone()
                dsa.write_compressed_kv(**given | part)
        found.append((slot_bytes(given["cache"], kind[3] == "index"), given["state"]))
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=str)
def test_graph_replay_with_new_positions(kind):
    """Single tokens: the same launch ends blocks or does not, as the starts say."""

    def single(step):
        return CASE.arguments("cuda", step, **sizes_of(kind, [1] * 5, [step + start for start in (5, 1, 2, 3, 4)]))

    held = single(0)
    graph, results = captured(CASE.results, held)
    for step in range(1, 10):
        for name, x in single(step).items():
            if isinstance(x, torch.Tensor):
                held[name].copy_(x)
        before = {name: held[name].clone() for name in CASE.written}
        graph.replay()
        torch.cuda.synchronize()
        CASE.check(held | before, results)


@by_kind
def test_the_state_is_written_without_a_cache(kind):
    """Slots beyond the cache, or a cache without pages."""
    for pages in (40, 0):
        given = CASE.arguments("cuda", **sizes_of(kind, [140, 9, 130], [0, 0, 0]))
        given["slots"][given["slots"] >= 0] = 40 * 64 + 5
        checked(given | {"cache": given["cache"][:pages]})


@by_kind
def test_wrong_sequences_write_nothing(kind):
    """State slots beyond the state; boundaries that decrease."""
    sizes = sizes_of(kind, [140, 9, 130], [0, 0, 0])
    given, before = CASE.arguments("cuda", **sizes), CASE.arguments("cuda", **sizes)
    given["slots"].fill_(40 * 64 + 5)
    state_slots = torch.tensor([-1, 5, 2**31 - 1], dtype=torch.int32, device="cuda")
    dsa.write_compressed_kv(**given | {"state_slots": state_slots})
    assert_same_bits(given["state"], before["state"])
    for bounds in ([0, 200, 100, 279], [-5, 10**9, -3, 7], [279, 0, 0, 0]):
        wrong = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32, device="cuda"), "starts": given["starts"] - 7}
        dsa.write_compressed_kv(**given | wrong)
    assert_same_bits(*(slot_bytes(x["cache"], kind[3] == "index") for x in (given, before)))
