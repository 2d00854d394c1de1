"""The training kernels of the indexer (scores, bits, gradients) against what they say they compute, in float64."""

import pytest
import torch

from dsa.ops.training import _indexer_gradient as ops
from dsa.testing import poisoned

DEVICE = "cuda"
ROWS = 128
SEQUENCES = [  # lengths of queries and keys
    ([300, 1, 0, 128, 200], [300, 1, 7, 128, 200]),
    ([70, 130, 64, 5], [400, 131, 64, 3]),
]


def make_q_tiles(lens_q, lens_k, causal, spare=2):
    """int32 [S, 8], as kernels/training/q_tiles.py has it, and the number of tiles of the longest sequence."""
    rows, first_q, first_k = [], 0, 0
    for b, (m, n) in enumerate(zip(lens_q, lens_k)):
        for begin in range(0, m, ROWS):
            count = min(ROWS, m - begin)
            seen, step = (n - m + 1 + begin, 1) if causal else (n, 0)
            visible = max(0, min(seen + step * (count - 1), n))
            rows.append([first_q + begin, count, first_k, n, seen, step, -(-visible // ROWS), b])
        first_q, first_k = first_q + m, first_k + n
    rows += [[0, 0, 0, 0, 0, 0, 0, -1]] * spare
    return torch.tensor(rows, dtype=torch.int32), -(-max(lens_k) // ROWS)


def visible_mask(q_tile, tile):
    """[128, 128]: which keys of a tile the rows of a q tile see."""
    _, rows, _, keys, seen, step, _, _ = q_tile
    row, key = torch.arange(ROWS, device=DEVICE)[:, None], torch.arange(ROWS, device=DEVICE)[None] + tile * ROWS
    return (row < rows) & (key < (seen + step * row).clamp(0, keys))


def unpack(active, heads):
    """bool [S, N, 128 (row), H, 128 (key)] of the words."""
    q_tiles, groups, blocks, _ = active.shape
    words = active.view(q_tiles, groups, blocks, 4, 4, 4, 2)  # warp, a, c, b
    bits = torch.stack([((words >> i) & 1).byte() for i in range(32)], -1)
    bits = bits.view(*words.shape, 2, 2, 8).flip(-1)  # half, e, j
    bits = bits.permute(0, 1, 2, 9, 5, 8, 3, 7, 4, 6).reshape(q_tiles, groups, blocks, 64, 64)
    bits = bits.permute(0, 2, 4, 1, 3).reshape(q_tiles, blocks // 2, ROWS, ROWS, heads)
    return bits.permute(0, 1, 3, 4, 2).bool()


class Problem:
    """Random inputs, dI among them, and the workspaces."""

    def __init__(self, heads, dim, lens_q, lens_k, causal, order=None):
        tokens, keys = sum(lens_q), sum(lens_k)
        self.heads, self.dim = heads, dim
        self.q = torch.randn(tokens, heads, dim, device=DEVICE).bfloat16()
        self.k = torch.randn(keys, dim, device=DEVICE).bfloat16()
        self.w = torch.randn(tokens, heads, device=DEVICE).bfloat16().float()
        self.q[tokens // 2 : tokens // 2 + 1, heads // 2] = 0
        self.k[keys // 3 : keys // 3 + 1] = 0
        q_tiles, tiles = make_q_tiles(lens_q, lens_k, causal)
        q_tiles = q_tiles if order is None else q_tiles[order(len(q_tiles))]
        self.rows, self.q_tiles = q_tiles.tolist(), q_tiles.to(DEVICE)
        self.scores = poisoned((len(q_tiles), tiles, ROWS, ROWS), torch.float32, DEVICE)
        self.active = poisoned(ops.active_shape(len(q_tiles), heads, tiles), torch.int32, DEVICE)
        self.di = torch.zeros(len(q_tiles), tiles, ROWS, ROWS, dtype=torch.bfloat16, device=DEVICE)
        for q_tile, s, j, _ in self.tiles():
            self.di[s, j] = (torch.randn(ROWS, ROWS, device=DEVICE) * visible_mask(q_tile, j)).bfloat16()

    def tiles(self):
        """(the q tile's row, its number, tile, (queries, keys) there are)."""
        for s, q_tile in enumerate(self.rows):
            for j in range(q_tile[6]):
                queries = slice(q_tile[0], q_tile[0] + q_tile[1])
                keys = slice(q_tile[2] + j * ROWS, q_tile[2] + min((j + 1) * ROWS, q_tile[3]))
                yield q_tile, s, j, (queries, keys)

    def run_scores(self):
        ops.index_scores(self.q, -self.k, self.w, self.q_tiles, self.scores, self.active)
        return self.scores.clone(), unpack(self.active, self.heads)

    def put_di(self):
        """dI where the gradients' kernels read it, NaN everywhere else."""
        self.scores.view(torch.bfloat16).fill_(torch.nan)
        di = ops.gradients_in(self.scores)
        for _, s, j, _ in self.tiles():
            di[s, j] = self.di[s, j].view(di.shape[2:])

    def expected(self, bits):
        """dq, dw, dk in float64 of dI and the bits."""
        q, k, w = self.q.double(), self.k.double(), self.w.double()
        g, dk = torch.zeros_like(q), torch.zeros_like(k)
        for q_tile, s, j, (queries, keys) in self.tiles():
            m, n = q_tile[1], keys.stop - keys.start
            masked = self.di[s, j, :m, None, :n].double() * bits[s, j, :m, :, :n]
            g[queries] += torch.einsum("thj,jd->thd", masked, k[keys])
            dk[keys] += torch.einsum("thj,thd->jd", masked, w[queries, :, None] * q[queries])
        return w[..., None] * g, (q * g).sum(-1), dk

    def run_gradients(self):
        dq, dw = poisoned(self.q.shape, torch.bfloat16, DEVICE), poisoned(self.w.shape, torch.float32, DEVICE)
        dk = torch.zeros(self.k.shape, device=DEVICE)
        workspaces = (self.q_tiles, self.scores, self.active)
        ops.index_query_grad(self.q, self.k, self.w, *workspaces, dq, dw)
        ops.index_key_grad(self.q, self.w.bfloat16(), *workspaces, dk)
        return dq, dw, dk


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequences", SEQUENCES, ids=("self", "cross"))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_scores_and_gradients(heads, dim, sequences, causal, record_error):
    problem = Problem(heads, dim, *sequences, causal)
    scores, bits = problem.run_scores()
    for q_tile, s, j, (queries, keys) in problem.tiles():
        m, n = q_tile[1], keys.stop - keys.start
        seen = visible_mask(q_tile, j)[:m, :n]
        dots = torch.einsum("thd,jd->thj", problem.q[queries].double(), problem.k[keys].double())
        expected = torch.einsum("thj,th->tj", dots.relu(), problem.w[queries].double())
        assert (scores[s, j, :m, :n] - expected).masked_fill(~seen, 0.0).abs().max() < 1e-3 * dim**0.5
        wrong = (bits[s, j, :m, :, :n] != (dots > 0)) & seen[:, None]
        assert (dots * wrong).abs().max() < 1e-4
    problem.put_di()
    got, expected = problem.run_gradients(), problem.expected(bits)
    errors = [error(x, y) for x, y in zip(got, expected)]
    record_error(max(errors))
    # dq is rounded to bf16, dI w too.
    assert errors[0] < 2.5e-3 and errors[1] < 1e-5 and errors[2] < 2.5e-3, errors


def test_a_product_of_zero_is_not_active():
    problem = Problem(8, 64, [100], [100], False)
    problem.q[:, 3] = 0
    problem.k[50] = 0
    _, bits = problem.run_scores()
    assert not bits[0, 0, :100, 3, :100].any() and not bits[0, 0, :100, :, 50].any()


def test_many_short_sequences_with_unused_q_tiles_between():
    """More q tiles than one launch of the key gradient takes, spans of one q tile, and unused ones anywhere."""
    problem = Problem(
        8, 64, [3, 1, 2] * 350, [3, 1, 2] * 350, True, lambda n: [n - 1, *range(5), n - 2, *range(5, n - 2)]
    )
    _, bits = problem.run_scores()
    problem.put_di()
    for got, expected in zip(problem.run_gradients(), problem.expected(bits)):
        assert error(got, expected) < 2.5e-3
