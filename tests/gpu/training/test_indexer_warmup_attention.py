"""indexer_warmup_attention (the warm-up stage of training) and its gradients on the GPU, compared with float64."""

from dataclasses import replace

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import INDEXER, distance, warmed_up, with_leaves
from dsa.ops.training import _packed_attention, _warmup_sum
from dsa.testing import poison_free_memory
from tests.gpu.attention import INF, NAN, no_keys
from tests.gpu.case_checks import by_sizes, check_layouts, grid, verify
from tests.gpu.op_checks import among_nan

LENGTHS = ((300, 300), (0, 5), (513, 513), (1, 1), (128, 128), (5, 200), (300, 3), (7, 0), (129, 129))
CASE = replace(*cases_of("indexer_warmup_attention"), sizes={"lengths": LENGTHS})
DIMS = [(64, 64), (128, 128), (192, 128), (576, 512)]
by_dims = pytest.mark.parametrize("dims", [DIMS[0], DIMS[2], DIMS[3]])
ATTENTION = ("q", "k", "v")
LEAVES = (*ATTENTION, *INDEXER)


def arguments(lengths=LENGTHS, **sizes):
    return CASE.arguments("cuda", lengths=lengths, **sizes)


def gradients(kl, given, weights):
    """Return the gradients of the indexer's tensors. weights [Tq]: the upstream gradient of kl"""
    return torch.autograd.grad(kl, [given[name] for name in INDEXER], weights, retain_graph=True)


def exact_gradients(given, weights):
    exact = with_leaves(given, torch.float64)
    return gradients(warmed_up(exact)[2], exact, weights.double())


def assert_near(found, expected, most):
    assert all(distance(x, y) < most for x, y in zip(found, expected, strict=True))


@by_sizes(
    grid(index=[(8, 64), (16, 128), (32, 64), (64, 64), (64, 128), (3, 64), (48, 128)], causal=(True, False)),
    grid(lengths=[LENGTHS[2:6]], dims=DIMS, heads=(1, 4, 64)),
    *(grid(lengths=[LENGTHS[2:6]], dims=DIMS[:3], heads=[heads], key_heads=[of]) for heads, of in ((6, 3), (5, 5))),
    [{"lengths": [(1 + i % 5, 1 + i % 7) for i in range(700)]}],
    # around: numbers of rows before and after the sequences. They belong to no sequence.
    grid(lengths=[((200, 200), (5, 60))], dims=DIMS, index=[(4, 64)], leaves=[LEAVES], around=[(3, 130)]),
)
def test_every_size_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize(
    ("dims", "key_heads", "most_together"),
    [*((dims, 1, 4) for dims in DIMS), ((192, 128), 4, 3), ((128, 128), 2, 3), ((64, 64), 1, 3)],
)
def test_attentions_gradients_are_right(monkeypatch, dims, key_heads, most_together, record_error):
    """With 3, a call of PyTorch's flash attention has at most three of the four heads. If G heads share keys, it gets a
    multiple or a divisor of G heads. For 576 channels the backward pass of sparse MLA attention computes the gradients
    instead."""
    if most_together < 4:
        monkeypatch.setattr(_packed_attention, "MOST_NUMBERS", (most_together + 1) * (261 + 512) * dims[0])
    sizes = {"lengths": ((200, 200), (60, 130), (1, 1)), "key_heads": key_heads, "dims": dims, "leaves": ATTENTION}
    verify(CASE, sizes, record_error)


def test_chunks_are_right(monkeypatch, record_error):
    """The op computes the loss in chunks of three q tiles. The workspace of a q tile has 5 key tiles of 128 keys. A
    score takes 5 bytes: an fp32 number, and a bit for each of 8 heads."""
    monkeypatch.setattr(_warmup_sum, "LEAST_WORKSPACE", 3 * 5 * 128 * 128 * 5)
    monkeypatch.setattr(_warmup_sum, "SHARE", 0)
    verify(CASE, {}, record_error)


def test_kept_gradients_are_those_computed_again():
    """The forward pass stores the gradients for weights of 1. Those of q_idx and w_idx are scaled per token. The
    gradient of k_idx is a sum over tokens: if the weights differ, the backward pass computes it again.

    The host knows that weights are equal only if their stride is 0. Otherwise it launches the kernels, which do nothing
    if the weights are equal on the device."""
    given = arguments()
    _, _, kl = dsa.indexer_warmup_attention(**given)
    one = torch.ones(1, device="cuda").expand(len(kl)) / len(kl)
    kept, nearly = gradients(kl, given, one[0].expand(len(kl))), one.clone()
    nearly[0] *= 1.0000002
    assert_near(kept, exact_gradients(given, one), 1e-2)
    for weights in (one, one.contiguous(), nearly):
        assert_near(kept, gradients(kl, given, weights), 4e-3)


def test_tokens_of_weight_zero_have_no_gradients():
    given = arguments(((200, 200), (150, 150)))
    _, _, kl = dsa.indexer_warmup_attention(**given)
    weights = torch.rand(350, device="cuda")
    weights[::2], weights[200:] = 0.0, 0.0
    dq, dk, dw = found = gradients(kl, given, weights)
    assert not dq[::2].any() and not dq[200:].any() and not dk[200:].any() and not dw[200:].any()
    assert_near(found, exact_gradients(given, weights), 1e-2)


def test_all_mass_on_one_key_is_right():
    given = arguments(((300, 300),))
    given["q"][:] = 0.0
    given["q"][..., 0], given["k"][..., 0], given["k"][0, :, 0] = 100.0, -100.0, 100.0
    CASE.check_call(given)


def test_layouts_change_no_bit():
    check_layouts(CASE, LEAVES, lengths=((200, 200), (60, 130)), key_heads=4, index=(4, 64))


@pytest.mark.parametrize("odd", [False, True])
def test_gradients_of_strided_tensors_are_right(odd):
    """If `odd`, most rows start at addresses that are not multiples of 16 bytes. Otherwise all heads of k and of q_idx
    have a stride of 0."""
    given = arguments(((200, 200), (60, 130)), key_heads=4, index=(4, 64), leaves=LEAVES)
    for name in LEAVES:
        x = given[name].detach()
        x = x[:, :1].expand(x.shape) if name in ("k", "q_idx") else x
        given[name] = (among_nan(x, 1, 0) if odd else x).requires_grad_()
    CASE.check_call(given)


@pytest.mark.parametrize("batch", [1, 5, 1023, 1024, 2500])
def test_bounds_ascend_inside_the_tensors(batch):
    tokens = 3 * batch
    right = torch.sort(torch.randint(0, tokens + 1, (2, batch + 1))).values
    hostile = torch.tensor([*no_keys(tokens + 1).tolist(), 0, tokens])[torch.randint(0, 8, right.shape)]
    wrong = torch.where(torch.rand(right.shape) < 0.3, hostile, right)
    for numbers in (right, wrong, torch.randint(-(2**31), 2**31, right.shape), right.flip(1)):
        expected = numbers.masked_fill((numbers < 0) | (numbers > tokens), 0).cummax(1).values
        plan, bounds = _warmup_sum.make_plan((*numbers.int().cuda(), tokens, tokens), tokens, tokens, True)
        assert torch.equal(bounds.cpu().long(), expected)
        used = plan.q_tiles[plan.q_tiles[:, 1] > 0].cpu()
        first, rows, first_key, keys = used[:, :4].unbind(1)
        assert rows.sum() == expected[0, -1] - expected[0, 0] and (rows <= 128).all()
        assert (first >= 0).all() and (first + rows <= tokens).all()
        assert (first_key >= 0).all() and (first_key + keys <= tokens).all()


def test_nan_stays_in_its_sequence():
    given = arguments(((200, 200), (150, 150), (140, 140)))
    clean = CASE.results(given)
    with torch.no_grad():
        given["q_idx"][220], given["k_idx"][240], given["q"][260] = NAN, NAN, NAN
    _, _, kl, dq, dk, dw = CASE.results(given)
    for x, y in zip(clean[2:], (kl, dq, dk, dw), strict=True):
        assert torch.equal(x[:200], y[:200]) and torch.equal(x[350:], y[350:])
    assert all(x[240:350].isnan().all() for x in (kl, dq, dw))


@pytest.mark.parametrize("index", [(8, 64), (64, 128)])
def test_nan_of_a_key_without_attention_reaches_its_queries(index):
    """The target of key 50 is 0 and the key's score is NaN."""
    given = arguments(((200, 200),), index=index)
    given["q"].fill_(4.0)
    given["k"].zero_()
    given["k"][0] = 4.0  # its logits are 181, those of other keys are 0
    with torch.no_grad():
        given["k_idx"][50] = NAN
    _, _, kl, dq, dk, dw = CASE.results(given)
    assert kl[:50].isfinite().all() and all(x[50:].isnan().all() for x in (kl, dq, dw))
    # ReLU passes no gradient to the NaN key itself. Only a few queries see each of the last 10 keys. If ReLU gives 0
    # for all heads of these queries, the key's gradient is 0.
    assert dk[:50].isnan().all() and dk[51:190].isnan().all()


def test_a_sequence_longer_than_said_is_nan():
    given = arguments(((300, 300), (128, 128)), leaves=("q", *INDEXER))
    short = given | {"max_seqlen_q": 128, "max_seqlen_k": 128}
    (out, _, *whole), (got_out, _, *got) = CASE.results(given), CASE.results(short)
    assert got[0][128:300].isnan().all() and not got[1][128:300].any()
    assert_near([x[300:] for x in (got_out, *got)], [x[300:] for x in (out, *whole)], 4e-3)


@by_dims
@pytest.mark.parametrize("lengths, sequences", [(((5, 7),), 0), (((5, 0), (3, 0)), 2), (((0, 0),), 1)])
def test_without_sequences_or_keys_all_is_zero(lengths, sequences, dims):
    given = arguments(lengths, dims=dims, index=(4, 64), leaves=LEAVES)
    given |= {name: given[name][: sequences + 1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    poison_free_memory(mebibytes=64)
    out, lse, *rest = CASE.results(given)
    assert lse.eq(INF).all() and not any(x.any() for x in (out, *rest))
