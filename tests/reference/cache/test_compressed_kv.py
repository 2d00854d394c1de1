"""The reference of the compressor: sequences in chunks, rejected drafts, and gradients."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.compressor import compressed
from dsa.reference import compress_kv
from tests.reference.common import F32, NAN, assert_close, assert_same_gradients, i32

_, WHOLE, *_ = cases_of("compressed_kv")
M, D = 4, 8
both = pytest.mark.parametrize("overlap", [False, True])


def arguments(lengths, overlap):
    return WHOLE.arguments(lengths=lengths, c=2 * D if overlap else D, overlap=overlap, dtype=F32)


def state_without_tokens(given, spare=0):
    rows = 2 * M if given["overlap"] else M
    return torch.full((1, rows + spare, 2, given["kv"].shape[1]), NAN)


def run(given, rows, start, state):
    part = {"kv": given["kv"][rows], "gate": given["gate"][rows], "cu_seqlens": i32([0, len(rows)])}
    return compress_kv(**given | part | {"starts": i32([start]), "state": state, "state_slots": i32([0])})


@both
@pytest.mark.parametrize("chunks", [[1] * 23, [23], [3, 1, 9, 10], [4, 4, 15], [5, 18]])
def test_chunks_continue_from_the_state(chunks, overlap):
    given = arguments([23], overlap)
    found, done, state = [], 0, state_without_tokens(given)
    for n in chunks:
        found.append(run(given, range(done, done + n), done, state)[0])
        done += n
    assert_close([torch.cat(found)], compressed(given), 1e-5)


@both
@pytest.mark.parametrize(
    ("drafts", "spare", "enough"),
    [(1, 0, True), *((drafts, drafts - 1 - few, not few) for drafts in (2, 3, 5) for few in (0, 1))],
)
def test_the_state_needs_a_row_for_each_rejected_draft_after_the_first(drafts, spare, enough, overlap):
    """A pass computes one token and `drafts` draft tokens. The first `right` drafts are accepted, and the next pass
    replaces the others. The entries are right if and only if the state has drafts - 1 spare rows (`enough`)."""
    given = arguments([60], overlap)
    state, generator = state_without_tokens(given, spare), torch.Generator().manual_seed(drafts)
    found, done = {}, 0
    while done < 60:
        right = min(int(torch.randint(drafts + 1, (), generator=generator)), 59 - done)
        new = [*range(done, done + 1 + right)] + [59 - done // 2] * (drafts - right)
        entries, tokens = run(given, new, done, state)
        found |= {done + t: entry for entry, t in zip(entries, tokens.tolist()) if t <= right}
        done += 1 + right
    entries = torch.stack([found[i] for i in range(M - 1, 60, M)]).double()
    assert torch.allclose(entries, compressed(given)[0], rtol=1e-5, atol=1e-6) == enough


@both
def test_gradients_are_those_of_the_formula(overlap):
    given, names = arguments([6, 9], overlap), ("kv", "gate", "ape")

    def entries(function):
        return lambda *inputs: function(given | dict(zip(names, inputs)))[0]

    functions = entries(lambda a: compress_kv(**a)), entries(compressed)
    assert_same_gradients(*functions, [given[name] for name in names])
