"""`sparse_indexer_loss` on the CPU: shipped variants, gradients, and copies."""

import itertools
import math

import pytest
import torch

import dsa
from dsa.kernels.training import sparse_indexer_grad_sm90, sparse_indexer_target_sm90
from dsa.ops.training import sparse_indexer_loss as op
from dsa.runtime import variants


def inputs(queries=5, heads=20, d=576, keys=30, k=70, index_heads=8, di=64, dtype=torch.bfloat16):
    q, kv = torch.randn(queries, heads, d).to(dtype), torch.randn(keys, 1, d).to(dtype)
    q_idx, k_idx = torch.randn(queries, index_heads, di).to(dtype), torch.randn(keys, di).to(dtype)
    indices = torch.randint(-3, keys + 3, (queries, 1, k), dtype=torch.int32)
    return q, kv, q_idx, k_idx, torch.randn(queries, index_heads), indices, d**-0.5


@pytest.fixture
def launches(kernel_path, monkeypatch):
    """Return the list of launches: (arguments of the compile function, arguments of the kernel). Stand-ins for the
    kernels write 1 to the loss and the gradients, 0.5 to d_scores, and 2^40 to integer sums for k_idx."""
    found = []

    def stand_in(variant):
        def launch(*arguments):
            found.append((variant.arguments, arguments))
            if variant.function == "compile_sparse_indexer_target":
                kl, d_scores = arguments[7:9]
                kl.fill_(1.0)
                d_scores.fill_(0.5)
            else:
                dq, dw, sums = arguments[7:10]
                dq.fill_(1.0)
                dw.fill_(1.0)
                sums.fill_(2**40 if sums.dtype == torch.int64 else 1)

        return launch

    monkeypatch.setattr(variants, "stand_in", stand_in)
    monkeypatch.setattr(
        op, "flash_mla_sparse_fwd", lambda q, *_: (None, None, torch.full(q.shape[:2], 7.0)), raising=True
    )
    return found


def test_the_kernels_ship_all_that_the_op_takes(launches):
    """The sizes include the smallest and the largest that the public docstring promises."""
    asked = {"forward": set(), "backward": set()}
    for d, heads, di, index_heads, k, deterministic in itertools.product(
        (512, 576), (1, 64, 65, 128), (64, 128), (1, 64), (1, 2048), (False, True)
    ):
        q, kv, q_idx, *rest, indices, scale = inputs(2, heads, d, 4, k, index_heads, di)
        kl = dsa.sparse_indexer_loss(q, kv, q_idx.requires_grad_(), *rest, indices, scale, deterministic=deterministic)
        kl.sum().backward()
        for kernel, (variant, _) in zip(asked, launches, strict=True):
            asked[kernel].add(variant)
        launches.clear()
    shipped = sparse_indexer_target_sm90.shipped_variants(), sparse_indexer_grad_sm90.shipped_variants()
    assert asked["forward"] == {variant for _, variant in shipped[0]} and len(shipped[0]) == 8
    assert asked["backward"] == {variant for _, variant in shipped[1]} and len(shipped[1]) == 4


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(launches, deterministic, w_dtype):
    q, kv, q_idx, k_idx, w, indices, scale = inputs()
    learned = [x.requires_grad_() for x in (q_idx, k_idx, w.to(w_dtype))]
    kl = dsa.sparse_indexer_loss(q.requires_grad_(), kv, *learned, indices, scale, None, deterministic)
    (kl * torch.arange(5)).sum().backward()
    variant, arguments = launches[1]
    assert variant == (64, deterministic) and q.grad is None
    assert torch.equal(arguments[5], torch.arange(5.0)) and (arguments[4] == 0.5).all()
    for x, y in zip((q_idx.grad, learned[2].grad), (q_idx, learned[2])):
        assert x.dtype == y.dtype and (x == 1).all()
    assert k_idx.grad.dtype == torch.bfloat16
    if deterministic:
        # bound: the largest magnitude of a term, with upstream gradients of at most 4. A sum of 350 terms, one per
        # index, fits in 62 bits.
        scale, bound = arguments[6].item(), 4 * w.abs().sum(1).max().item() * q_idx.abs().max().item()
        assert 2**58 <= 350 * bound * scale < 2**62
        assert torch.allclose(k_idx.grad.float(), torch.full_like(k_idx, 2**40 / scale).float(), rtol=2**-8)
    else:
        assert arguments[6] is None and (k_idx.grad == 1).all()


def test_deterministic_as_pytorch_is_told(launches):
    for told in (True, False):
        torch.use_deterministic_algorithms(told)
        try:
            tensors = inputs()
            dsa.sparse_indexer_loss(*tensors[:3], tensors[3].requires_grad_(), *tensors[4:]).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert launches[-1][0] == (64, told)


def test_units_of_numbers_that_are_none():
    q, w, d = torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 64).bfloat16()
    for g in (torch.full((3,), math.inf), torch.full((3,), math.nan)):
        assert op._fixed_scale(q, w, g, d, 100)[1].isnan().all()
    for g in (torch.zeros(3), torch.full((3,), 1e-38), torch.full((3,), 1e37)):
        scale, inverse = op._fixed_scale(q, w, g, d, 100)
        assert scale.isfinite().all() and scale > 0 and inverse.isfinite().all()
    d[1] = math.nan
    scale, inverse = op._fixed_scale(q, w, torch.ones(3), d, 100)
    assert scale.isfinite().all() and inverse.isnan().all()


def test_what_is_copied(launches):
    """Unaligned rows of queries and indices with gaps are copied."""
    q, kv, q_idx, k_idx, w, indices, scale = inputs()
    dsa.sparse_indexer_loss(q, kv, q_idx, k_idx, w, indices, scale)
    assert [x.data_ptr() for x in launches[0][1][:5]] == [x.data_ptr() for x in (q, kv, q_idx, k_idx, w)]
    odd = [torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in (q, q_idx)]
    dsa.sparse_indexer_loss(odd[0], kv, odd[1], k_idx, w, indices.repeat_interleave(2, -1)[..., ::2], scale)
    for i, x in ((0, q), (2, q_idx), (5, indices[:, 0])):
        assert launches[1][1][i].is_contiguous() and torch.equal(launches[1][1][i], x)


def test_nothing_launches_nothing(launches):
    q, kv, q_idx, k_idx, w, indices, scale = inputs()
    for tensors in (
        (q[:0], kv, q_idx[:0], k_idx, w[:0], indices[:0]),
        (q, kv[:0], q_idx, k_idx[:0], w, indices),
        (q, kv, q_idx, k_idx, w, indices[..., :0]),
    ):
        learned = [x.detach().requires_grad_() for x in tensors[2:5]]
        kl = dsa.sparse_indexer_loss(*tensors[:2], *learned, tensors[5], scale)
        kl.sum().backward()
        assert kl.shape == tensors[0].shape[:1] and not kl.any() and all(not x.grad.any() for x in learned)
    assert not launches
