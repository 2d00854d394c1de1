"""The compressor's reference: sizes, chunks, tokens that are taken back, gradients, wrong arguments."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.compressor import compressed
from dsa.reference import compress_kv
from tests.reference.common import i32

COMPRESS, WHOLE, *_ = cases_of("compressed_kv")
M, D = 4, 8
both = pytest.mark.parametrize("overlap", [False, True])


@both
@pytest.mark.parametrize("lengths", [[0], [3], [4], [9, 1, 0, 16], [7, 8]])
def test_against_float64(lengths, overlap):
    kind = {"lengths": lengths, "c": 16, "overlap": overlap, "dtype": torch.float32}
    WHOLE.verify(**kind)
    for start in range(9):
        COMPRESS.verify(starts=[start] * len(lengths), spare=start % 3, **kind)


def sequence(length, overlap):
    """One sequence, its entries by the formula, and a state without tokens."""
    given = WHOLE.arguments(lengths=[length], c=2 * D if overlap else D, overlap=overlap, dtype=torch.float32)
    state = torch.full((1, 2 * M if overlap else M, 2, given["kv"].shape[1]), torch.nan)
    return given, compressed(given)[0], state


def run(given, rows, start, state):
    part = {"kv": given["kv"][rows], "gate": given["gate"][rows], "cu_seqlens": i32([0, len(rows)])}
    return compress_kv(**given | part | {"starts": i32([start]), "state": state, "state_slots": i32([0])})


@both
@pytest.mark.parametrize("chunks", [[1] * 23, [23], [3, 1, 9, 10], [4, 4, 15], [5, 18]])
def test_chunks_continue_from_the_state(chunks, overlap):
    given, expected, state = sequence(23, overlap)
    found, done = [], 0
    for n in chunks:
        found.append(run(given, range(done, done + n), done, state)[0])
        done += n
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_tokens_that_are_taken_back(drafts, overlap):
    """Each pass has one token and some drafts, of which the first ones may be right. The state needs one more row for
    each draft after the first."""
    given, expected, state = sequence(60, overlap)
    generator = torch.Generator().manual_seed(drafts)
    for spare in (drafts - 1, *([drafts - 2] if drafts > 1 else [])):
        rows = torch.full((1, state.shape[1] + spare, *state.shape[2:]), torch.nan)
        got, done = {}, 0
        while done < 60:
            right = min(int(torch.randint(drafts + 1, (), generator=generator)), 59 - done)
            new = [*range(done, done + 1 + right)] + [59 - done // 2] * (drafts - right)
            entries, tokens = run(given, new, done, rows)
            got |= {done + t: entry for entry, t in zip(entries, tokens.tolist()) if t <= right}
            done += 1 + right
        entries = torch.stack([got[i] for i in range(M - 1, 60, M)]).double()
        assert torch.allclose(entries, expected, rtol=1e-5, atol=1e-6) == (spare == drafts - 1)


@both
def test_gradients_are_those_of_the_formula(overlap):
    given = WHOLE.arguments(lengths=[6, 9], c=2 * D if overlap else D, overlap=overlap, dtype=torch.float32)
    tensors = [given[name].requires_grad_() for name in ("kv", "gate", "ape")]
    (entries, _), (expected, _) = compress_kv(**given), compressed(given)
    got, wanted = (torch.autograd.grad(x.square().sum(), tensors) for x in (entries, expected))
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def inputs(lengths):
    given = WHOLE.arguments(lengths=lengths, c=D, overlap=False, dtype=torch.float32)
    return [given[name] for name in ("kv", "gate", "ape", "cu_seqlens")]
