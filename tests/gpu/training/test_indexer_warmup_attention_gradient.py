"""The kernels of the indexer in the warm-up stage of training, called directly and compared with float64."""

import pytest
import torch

from dsa.ops.training import _indexer_gradient as ops
from dsa.ops.training._warmup_sum import make_plan
from dsa.testing import poisoned
from tests.gpu.attention import starts

TILE = 128


def unpack(active, heads):
    """Unpack active bits (see active_bits.py) to bool [q tiles, key tiles per q tile, 128 queries, 128 keys, heads]."""
    q_tiles, groups, blocks, _ = active.shape
    words = active.view(q_tiles, groups, blocks, 4, 4, 4, 2)  # dims 3 to 6: warp, then a, c, b of `word_place`
    bits = torch.stack([((words >> i) & 1).byte() for i in range(32)], -1)
    bits = bits.view(*words.shape, 2, 2, 8).flip(-1)  # half, e, j: the bits of a word
    bits = bits.permute(0, 1, 2, 9, 5, 8, 3, 7, 4, 6).reshape(q_tiles, groups, blocks, 64, 64)
    bits = bits.permute(0, 2, 4, 1, 3).reshape(q_tiles, blocks // 2, TILE, TILE, heads)
    return bits.permute(0, 1, 3, 2, 4).bool()


class Problem:
    """Random inputs, random gradients di [Tq, Tk] of the scores, and the kernels' workspaces. order: number of q tiles
    -> indices of the plan's q tiles in their new order"""

    def __init__(self, heads, dim, lens_q, lens_k, causal, order=range):
        tokens, keys = sum(lens_q), sum(lens_k)
        self.q = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
        self.k = torch.randn(keys, dim, device="cuda").bfloat16()
        self.w = torch.randn(tokens, heads, device="cuda").bfloat16().float()
        self.q[tokens // 2, heads // 2], self.k[keys // 3] = 0, 0
        blocks = [torch.ones(m, n).tril(n - m if causal else n) for m, n in zip(lens_q, lens_k, strict=True)]
        self.visible = torch.block_diag(*blocks).bool().cuda()
        self.di = (torch.randn(tokens, keys, device="cuda") * self.visible).bfloat16()
        plan, _ = make_plan((starts(lens_q), starts(lens_k), max(lens_q), max(lens_k)), tokens, keys, causal)
        self.q_tiles, n = plan.q_tiles[[*order(len(plan.q_tiles))]], plan.max_key_tiles
        self.scores = poisoned((len(self.q_tiles), n, TILE, TILE), torch.float32, "cuda")
        self.active = poisoned(ops.active_shape(len(self.q_tiles), heads, n), torch.int32, "cuda")

    def tiles(self):
        """Yield ((q tile, key tile), slice of the queries, slice of the keys) of each tile that has keys."""
        for s, (first_q, rows, first_k, keys, _, _, count, _) in enumerate(self.q_tiles.tolist()):
            for low in range(0, TILE * count, TILE):
                yield (
                    (s, low // TILE),
                    slice(first_q, first_q + rows),
                    slice(first_k + low, first_k + min(low + TILE, keys)),
                )

    def run_scores(self):
        """Return the scores [Tq, Tk] and the active heads [Tq, Tk, H]. Both are valid only where `visible`."""
        ops.index_scores(self.q, -self.k, self.w, self.q_tiles, self.scores, self.active)
        bits = unpack(self.active, self.q.shape[1])
        scores = torch.zeros(self.visible.shape, device="cuda")
        active = torch.zeros(*self.visible.shape, self.q.shape[1], dtype=torch.bool, device="cuda")
        for place, queries, keys in self.tiles():
            inside = slice(queries.stop - queries.start), slice(keys.stop - keys.start)
            scores[queries, keys], active[queries, keys] = self.scores[place][inside], bits[place][inside]
        return scores, active

    def run_gradients(self):
        """Return dq, dw and dk for di. di is written to the memory of the scores."""
        self.scores.view(torch.bfloat16).fill_(torch.nan)
        for place, queries, keys in self.tiles():
            tile = torch.zeros(TILE, TILE, dtype=torch.bfloat16, device="cuda")
            tile[: queries.stop - queries.start, : keys.stop - keys.start] = self.di[queries, keys]
            held = ops.gradients_in(self.scores)[place]
            held.copy_(tile.view(held.shape))
        dq, dw = poisoned(self.q.shape, torch.bfloat16, "cuda"), poisoned(self.w.shape, torch.float32, "cuda")
        dk = torch.zeros(self.k.shape, device="cuda")
        workspaces = (self.q_tiles, self.scores, self.active)
        ops.index_query_grad(self.q, self.k, self.w, *workspaces, dq, dw)
        ops.index_key_grad(self.q, self.w.bfloat16(), *workspaces, dk)
        return dq, dw, dk

    def errors(self, active):
        q, k, w, di = (x.double() for x in (self.q, self.k, self.w[..., None], self.di[..., None]))
        g = torch.einsum("tjh,jd->thd", di * active, k)
        expected = w * g, (q * g).sum(-1), torch.einsum("tjh,thd->jd", di * active, w * q)
        pairs = zip(self.run_gradients(), expected, strict=True)
        return [((got - right).norm() / right.norm()).item() for got, right in pairs]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "sequences",
    [  # (queries, keys) of each sequence
        ([300, 1, 0, 128, 200], [300, 1, 7, 128, 200]),
        ([70, 130, 64, 5], [400, 131, 64, 3]),
    ],
    ids=("self", "cross"),
)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_scores_and_gradients_are_right(heads, dim, sequences, causal, record_error):
    problem = Problem(heads, dim, *sequences, causal)
    scores, active = problem.run_scores()
    dots = torch.einsum("thd,jd->tjh", problem.q.double(), problem.k.double())
    expected = torch.einsum("tjh,th->tj", dots.relu(), problem.w.double())
    assert (scores - expected)[problem.visible].abs().max() < 1e-3 * dim**0.5
    assert (dots * (active != (dots > 0)))[problem.visible].abs().max() < 1e-4
    errors = problem.errors(active)
    record_error(max(errors))
    # dq and the product dI w, from which the kernel computes dk, are rounded to bf16.
    assert errors[0] < 2.5e-3 and errors[1] < 1e-5 and errors[2] < 2.5e-3, errors


def test_a_product_of_zero_is_not_active():
    problem = Problem(8, 64, [100], [100], False)
    problem.q[:, 3], problem.k[50] = 0, 0
    _, active = problem.run_scores()
    assert not active[..., 3].any() and not active[:, 50].any()


def test_many_short_sequences_with_unused_q_tiles_between_are_right():
    """1050 q tiles are more than the 1024 of one launch of the key gradient. The plan's last two q tiles are unused.
    They are moved to the beginning and between used ones."""
    lengths = [3, 1, 2] * 350
    problem = Problem(8, 64, lengths, lengths, True, lambda n: [n - 1, *range(5), n - 2, *range(5, n - 2)])
    _, active = problem.run_scores()
    assert max(problem.errors(active)) < 2.5e-3
