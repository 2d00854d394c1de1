"""The warm-up's loss in float64: gradients by finite differences, the formula in words, and the odd cases."""

import pytest
import torch

from dsa.reference import indexer_warmup_attention
from tests.reference.common import assert_refused

F64 = torch.float64


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def warmup_inputs(lengths_q, lengths_k, heads=4, key_heads=2, index_heads=3, d=5, dv=6, di=4, dtype=F64):
    torch.manual_seed(0)
    tq, tk = sum(lengths_q), sum(lengths_k)
    shapes = (
        (tq, heads, d),
        (tk, key_heads, d),
        (tk, key_heads, dv),
        (tq, index_heads, di),
        (tk, di),
        (tq, index_heads),
    )
    tensors = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return tensors, (cu(*lengths_q), cu(*lengths_k), max(lengths_q), max(lengths_k), 0.5)


@pytest.mark.parametrize("causal", [True, False])
def test_warmup_gradients(causal):
    tensors, rest = warmup_inputs([1, 2, 0, 3], [1, 3, 1, 2], heads=2, key_heads=1, index_heads=2, d=3, dv=3, di=3)

    def attention(*inputs):
        out, lse, _ = indexer_warmup_attention(*inputs, *tensors[3:], *rest, causal)
        return out, lse.masked_fill(lse == torch.inf, 0.0)

    def loss(*inputs):
        return indexer_warmup_attention(*tensors[:3], *inputs, *rest, causal)[2]

    assert torch.autograd.gradcheck(attention, tensors[:3])
    assert torch.autograd.gradcheck(loss, tensors[3:])


def test_warmup_in_words():
    """One query after the other, with loops over heads and the definition of KL."""
    (q, k, v, q_idx, k_idx, w_idx), rest = warmup_inputs([3, 2], [4, 2], index_heads=4)
    out, lse, kl = indexer_warmup_attention(q, k, v, q_idx, k_idx, w_idx, *rest, True)
    # The rows of each query's keys: of the first sequence 4, of the second 2.
    for t, seen in enumerate([slice(0, 2), slice(0, 3), slice(0, 4), slice(4, 5), slice(4, 6)]):
        heads = []
        for h in range(4):
            logits = 0.5 * k[seen, h // 2] @ q[t, h]
            heads.append(logits.softmax(0))
            assert torch.allclose(out[t, h], heads[-1] @ v[seen, h // 2])
            assert torch.allclose(lse[h, t], logits.logsumexp(0))
        scores = [w_idx[t, j] * (k_idx[seen] @ q_idx[t, j]).clamp(min=0) for j in range(4)]
        p, score = sum(heads) / 4, sum(scores)
        assert torch.allclose(kl[t], (p * (p.log() - score.log_softmax(0))).sum())


def test_the_indexer_learns_from_the_loss_alone():
    tensors, rest = warmup_inputs([4], [4])
    out, lse, kl = indexer_warmup_attention(*tensors, *rest)
    attention, indexer = tensors[:3], tensors[3:]
    assert torch.autograd.grad(kl.sum(), attention, allow_unused=True, retain_graph=True) == (None,) * 3
    assert torch.autograd.grad(out.sum() + lse.sum(), indexer, allow_unused=True, retain_graph=True) == (None,) * 3


def test_warmup_edges():
    """No keys, one key, all mass on one key, and weights of zero."""
    (q, k, v, q_idx, k_idx, w_idx), rest = warmup_inputs([3, 1], [1, 1], dtype=torch.float32)
    out, lse, kl = indexer_warmup_attention(q, k, v, q_idx, k_idx, w_idx, *rest)
    assert (out[:2] == 0).all() and (lse[:, :2] == torch.inf).all() and (kl == 0).all()
    assert torch.allclose(out[2], v[0].repeat_interleave(2, 0)) and torch.allclose(out[3], v[1].repeat_interleave(2, 0))
    (out.sum() + kl.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, q_idx, k_idx, w_idx))
    (q, k, v, q_idx, k_idx, w_idx), rest = warmup_inputs([4], [4], dtype=torch.float32)
    kl = indexer_warmup_attention(1e4 * q, k, v, q_idx, k_idx, 0 * w_idx, *rest)[2]
    # Every head at one key, and the indexer at none in particular.
    assert kl.isfinite().all() and (kl <= torch.arange(1, 5).log() + 1e-5).all() and kl[0] == 0


def test_warmup_without_sequences():
    tensors, _ = warmup_inputs([0], [0], index_heads=4)
    nothing = torch.zeros(1, dtype=torch.int32)
    out, lse, kl = indexer_warmup_attention(*tensors, nothing, nothing, 0, 0, 0.5, True)
    assert out.shape == (0, 4, 6) and lse.shape == (4, 0) and kl.shape == (0,)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(4, 0, 5)}, r"q: must have at least one head, got shape \[4, 0, 5\]"),
        ({"k": torch.zeros(4, 3, 5)}, "v: shape must be|k: its 3 heads must divide q's 4"),
        ({"cu_seqlens_k": cu(3)}, r"cu_seqlens_k: must ascend from 0 to 4, got \[0, 3\]"),
        ({"w_idx": torch.zeros(4, 2)}, r"w_idx: shape must be \[4, 3\], got \[4, 2\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    tensors, rest = warmup_inputs([4], [4], dtype=torch.float32)
    names = ("q", "k", "v", "q_idx", "k_idx", "w_idx", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments = dict(zip((*names, "softmax_scale"), (*tensors, *rest)))
    assert_refused(message, indexer_warmup_attention, **arguments | change)
