"""The warm-up's kernels against float64, on the GPU: attention, loss, and all gradients."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import INDEXER, distance, warmed_up, with_leaves
from dsa.ops.training import _packed_attention, _warmup_sum
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits

(CASE,) = cases_of("indexer_warmup_attention")
LENGTHS = ((300, 300), (0, 5), (513, 513), (1, 1), (128, 128), (5, 200), (300, 3), (7, 0), (129, 129))
ATTENTION = ("q", "k", "v")


def arguments(lengths=LENGTHS, **sizes):
    return CASE.arguments("cuda", lengths=lengths, **sizes)


def verify(record_error=None, **sizes):
    poison_free_memory(mebibytes=256)
    error = CASE.verify("cuda", **{"lengths": LENGTHS, "key_heads": 1, "dims": (128, 128)} | sizes)
    if record_error:
        record_error(error)


def check(given):
    CASE.check(given, CASE.results(given))


def gradients(kl, given, weights):
    """Of the indexer's tensors, for these weights of the tokens."""
    return torch.autograd.grad(kl, [given[name] for name in INDEXER], weights, retain_graph=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", [(8, 64), (16, 128), (32, 64), (64, 64), (64, 128), (3, 64), (48, 128)])
def test_index_heads(index, causal, record_error):
    verify(record_error, index=index, causal=causal)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (576, 512)])
@pytest.mark.parametrize("heads, key_heads", [(1, 1), (4, 1), (6, 3), (5, 5), (64, 1)])
def test_heads(dims, heads, key_heads, record_error):
    if dims[0] == 576 and key_heads > 1:
        pytest.skip("latents are one head")
    verify(record_error, lengths=LENGTHS[2:6], heads=heads, key_heads=key_heads, dims=dims)


def test_many_sequences():
    verify(lengths=[(1 + i % 5, 1 + i % 7) for i in range(700)])


@pytest.mark.parametrize(
    ("dims", "key_heads", "together"),
    [
        *(((64, 64), 1, 4), ((128, 128), 1, 4), ((192, 128), 1, 4), ((576, 512), 1, 4)),
        *(((192, 128), 4, 3), ((128, 128), 2, 3), ((64, 64), 1, 3)),
    ],
)
def test_attentions_gradients(monkeypatch, dims, key_heads, together):
    """By PyTorch's flash attention, of all heads or some at a time, or by sparse MLA attention's backward pass."""
    if together < 4:
        monkeypatch.setattr(_packed_attention, "MOST_NUMBERS", (together + 1) * (261 + 512) * dims[0])
    verify(lengths=((200, 200), (60, 130), (1, 1)), key_heads=key_heads, dims=dims, leaves=ATTENTION)


def test_chunks(monkeypatch):
    """A workspace of three q tiles gives the same bits, but for the sums of k_idx's gradient."""
    given = arguments()
    whole = CASE.results(given)
    monkeypatch.setattr(_warmup_sum, "LEAST_WORKSPACE", 3 * 5 * 128 * 128 * 5)
    monkeypatch.setattr(_warmup_sum, "SHARE", 0)
    got = CASE.results(given)
    assert_same_bits((*got[:4], got[5]), (*whole[:4], whole[5]))
    assert distance(got[4], whole[4]) < 1e-3


def test_kept_gradients_are_those_computed_again():
    """The forward pass keeps gradients for equal weights. Others, and equal ones that only the device knows, are
    computed again."""
    given = arguments()
    _, _, kl = dsa.indexer_warmup_attention(**given)
    one = torch.ones(1, device="cuda").expand(len(kl)) / len(kl)
    kept = gradients(kl, given, (torch.ones((), device="cuda") / len(kl)).expand(len(kl)))
    nearly = one.clone()
    nearly[0] *= 1.0000002
    exact = with_leaves(given, torch.float64)
    found = [gradients(warmed_up(exact)[2], exact, one.double())]
    for weights in (one, one.contiguous(), nearly):
        found.append(gradients(kl, given, weights))
    for i, each in enumerate(found):
        for x, y in zip(kept, each, strict=True):
            assert distance(x, y) < (1e-2 if i == 0 else 4e-3)


def test_tokens_of_weight_zero_have_no_gradients():
    given = arguments(((200, 200), (150, 150)))
    _, _, kl = dsa.indexer_warmup_attention(**given)
    weights = torch.rand(350, device="cuda")
    weights[::2], weights[200:] = 0.0, 0.0
    dq, dk, dw = gradients(kl, given, weights)
    assert not dq[::2].any() and not dq[200:].any() and not dk[200:].any() and not dw[200:].any()
    exact = with_leaves(given, torch.float64)
    for x, y in zip((dq, dk, dw), gradients(warmed_up(exact)[2], exact, weights.double()), strict=True):
        assert distance(x, y) < 1e-2


def test_all_mass_on_one_key():
    given = arguments(((300, 300),))
    given["q"][:] = 0.0
    given["q"][..., 0], given["k"][..., 0], given["k"][0, :, 0] = 100.0, -100.0, 100.0
    check(given)


def test_strides():
    """Rows at no multiple of 16 bytes, and heads that share their rows."""
    given = arguments(((200, 200), (60, 130)), key_heads=4, index=(4, 64), leaves=(*ATTENTION, *INDEXER))
    names = (*ATTENTION, *INDEXER)
    tensors = {name: given[name].detach() for name in names}
    tensors |= {name: tensors[name][:, :1].expand(tensors[name].shape) for name in ("k", "q_idx")}
    odd = {name: torch.cat([x[..., :1], x], -1)[..., 1:] for name, x in tensors.items()}
    shared = odd | {name: tensors[name] for name in ("q", "k", "q_idx", "w_idx")}
    results = []
    for inputs in ({name: x.contiguous() for name, x in tensors.items()}, odd, shared):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        results.append(CASE.results(given | leaves))
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            assert distance(x, y) < 4e-3


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 512)])
def test_rows_of_no_sequence_are_empty(dims):
    """Rows before the first sequence and after the last one, with NaN in the keys, change no other row."""
    given = arguments(((200, 200), (5, 60)), dims=dims, index=(4, 64), leaves=(*ATTENTION, *INDEXER))
    before, after = 3, 130

    def padded(x, value):
        edges = [x.new_full((n, *x.shape[1:]), value) for n in (before, after)]
        return torch.cat((edges[0], x.detach(), edges[1]))

    values = {name: torch.nan if name in ("k", "v", "k_idx") else 7.0 for name in (*ATTENTION, *INDEXER)}
    wide = {name: padded(given[name], value).requires_grad_() for name, value in values.items()}
    if dims[0] == 576:
        wide["v"] = wide["k"][..., :512]
    wide |= {name: given[name] + before for name in ("cu_seqlens_q", "cu_seqlens_k")}
    grad_out, grad_kl = torch.randn(205, 4, dims[1], device="cuda").bfloat16(), torch.rand(205, device="cuda")

    def run(given, grad_out, grad_kl):
        poison_free_memory(mebibytes=256)
        out, lse, kl = dsa.indexer_warmup_attention(**given)
        poison_free_memory(mebibytes=256)
        leaves = [given[name] for name in values if given[name].is_leaf]
        return out, lse.T, kl, *torch.autograd.grad((out, kl), leaves, (grad_out, grad_kl))

    found = run(given | wide, padded(grad_out, 1.0), padded(grad_kl, 1.0)), run(given, grad_out, grad_kl)
    for i, (x, inner) in enumerate(zip(*found, strict=True)):
        assert distance(x[before:-after].nan_to_num(posinf=1e3), inner.nan_to_num(posinf=1e3)) < 4e-3
        for edge in (x[:before], x[-after:]):
            assert edge.eq(torch.inf).all() if i == 1 else not edge.any()


@pytest.mark.parametrize("batch", [1, 5, 1023, 1024, 2500])
def test_bounds_ascend_inside_the_tensors(batch):
    torch.manual_seed(batch)
    tokens = 3 * batch
    right = torch.sort(torch.randint(0, tokens + 1, (2, batch + 1))).values
    hostile = torch.tensor([-1, -(2**31), 2**31 - 1, tokens + 1, 0, tokens])
    wrong = torch.where(torch.rand(2, batch + 1) < 0.3, hostile[torch.randint(0, 6, (2, batch + 1))], right)
    for numbers in (right, wrong, torch.randint(-(2**31), 2**31, (2, batch + 1)), right.flip(1)):
        expected = numbers.masked_fill((numbers < 0) | (numbers > tokens), 0).cummax(1).values
        plan, bounds = _warmup_sum.make_plan((*numbers.int().cuda(), tokens, tokens), tokens, tokens, True)
        assert torch.equal(bounds.cpu().long(), expected)
        used = plan.q_tiles[plan.q_tiles[:, 1] > 0].cpu()
        first, rows, first_key, keys = used[:, :4].unbind(1)
        assert rows.sum() == expected[0, -1] - expected[0, 0] and (rows <= 128).all()
        assert (first >= 0).all() and (first + rows <= tokens).all()
        assert (first_key >= 0).all() and (first_key + keys <= tokens).all()


def test_repeats_are_the_same_bits():
    given = arguments(((700, 700), (33, 900)), heads=16, index=(64, 128))
    assert_runs_have_the_same_bits(CASE.results, given, times=3)


def test_nan_stays_in_its_sequence():
    given = arguments(((200, 200), (150, 150), (140, 140)))
    clean = CASE.results(given)
    with torch.no_grad():
        given["q_idx"][220], given["k_idx"][240], given["q"][260] = torch.nan, torch.nan, torch.nan
    _, _, kl, dq, dk, dw = CASE.results(given)
    for x, y in zip(clean[2:], (kl, dq, dk, dw), strict=True):
        assert torch.equal(x[:200], y[:200]) and torch.equal(x[350:], y[350:])
    assert all(x[240:350].isnan().all() for x in (kl, dq, dw))


@pytest.mark.parametrize("index", [(8, 64), (64, 128)])
def test_nan_of_a_key_without_attention(index):
    """Its target is 0 and its score NaN: the loss and all gradients of the queries that see it are NaN."""
    given = arguments(((200, 200),), index=index)
    with torch.no_grad():
        given["q"].fill_(4.0)
        given["k"].zero_()
        given["k"][0] = 4.0  # a logit of 181, others 0
        given["k_idx"][50] = torch.nan
    _, _, kl, dq, dk, dw = CASE.results(given)
    assert kl[:50].isfinite().all() and kl[50:].isnan().all()
    assert dq[50:].isnan().all() and dw[50:].isnan().all()
    # The relu has no gradient at the NaN itself, and keys of the last queries may have no active head.
    assert dk[:50].isnan().all() and dk[51:190].isnan().all()


def test_a_sequence_longer_than_said_is_nan():
    """It leaves the others as they are."""
    given = arguments(((300, 300), (128, 128)))
    whole, short = CASE.results(given), given | {"max_seqlen_q": 128, "max_seqlen_k": 128}
    got = CASE.results(short)
    assert got[2][128:300].isnan().all()
    for x, right in zip((got[0], *got[2:]), (whole[0], *whole[2:]), strict=True):
        assert distance(x[300:], right[300:]) < 4e-3
    q = given["q"].requires_grad_()
    out, _, _ = dsa.indexer_warmup_attention(**short)
    poison_free_memory(mebibytes=64)
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert not grad[128:300].any() and not grad[300:].isnan().any()


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 512)])
@pytest.mark.parametrize("lengths, sequences", [(((5, 7),), 0), (((5, 0), (3, 0)), 2)])
def test_without_sequences_or_keys_all_is_zero(lengths, sequences, dims):
    given = arguments(lengths, dims=dims, index=(4, 64), leaves=(*ATTENTION, *INDEXER))
    given |= {name: given[name][: sequences + 1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    poison_free_memory(mebibytes=64)
    out, lse, *rest = CASE.results(given)
    assert lse.eq(torch.inf).all() and not any(x.any() for x in (out, *rest))


def test_without_queries_results_are_empty():
    out, lse, kl = CASE.run(arguments(((0, 0),)))
    assert out.shape == (0, 4, 128) and lse.shape == (4, 0) and kl.shape == (0,)
