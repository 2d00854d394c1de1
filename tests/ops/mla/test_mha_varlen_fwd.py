"""The bridges of multi-head attention and of selections' bits, on the CPU: dispatch, what they launch, and errors."""

import math

import pytest
import torch

import dsa

BF16 = torch.bfloat16


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def arguments(dims=(192, 128), heads=4, kv_heads=2, dtype=BF16, **changed):
    given = {"q": torch.randn(5, heads, dims[0]).to(dtype), "k": torch.randn(9, kv_heads, dims[0]).to(dtype)}
    given |= {"v": torch.randn(9, kv_heads, dims[1]).to(dtype), "cu_seqlens_q": i32([0, 2, 5])}
    given |= {"cu_seqlens_k": i32([0, 3, 9]), "max_seqlen_k": 6, "softmax_scale": 0.1}
    return given | changed


SELECTED = dsa.selection_bits(i32([[0, 1], [0, 2], [3, 5], [4, 7], [8, 3]]), i32([0, 0, 3, 3, 3]), 6)


def test_what_the_kernel_gets(named_launches):
    values = arguments()
    for selected, dense_keys in ((None, 7), (SELECTED, 3)):
        out, lse = dsa.mha_varlen_fwd(**values, selected=selected, dense_keys=dense_keys)
        [(name, variant, launched)] = named_launches
        named_launches.clear()
        assert name == "" and variant == (BF16, 192, 128, 0, selected is not None)
        q, k, rope, v, cu_q, cu_k, written, own_lse, bits, dense, counter, scale, causal, group, ctas = launched
        assert q is values["q"] and k is values["k"] and v is values["v"] and written is out and own_lse is lse
        assert rope is None
        assert cu_q is values["cu_seqlens_q"] and cu_k is values["cu_seqlens_k"] and bits is selected
        assert dense == (None if selected is None else 3) and counter.tolist() == [0]
        assert scale == pytest.approx(0.1 * math.log2(math.e)) and (causal, group, ctas) == (1, 4, 132)
    assert out.shape == (5, 4, 128) and lse.shape == (4, 5) and lse.dtype == torch.float32


def test_rope_channels_apart(named_launches):
    values = arguments()
    k, rope = values["k"][..., :128], values["k"][:, 0, 128:]
    dsa.mha_varlen_fwd(**values | {"k": k}, k_rope=rope)
    [(_, variant, launched)] = named_launches
    assert variant == (BF16, 192, 128, 64, False) and launched[1].data_ptr() == k.data_ptr()
    assert launched[2].shape == (9, 1, 64) and torch.equal(launched[2][:, 0], rope)


def test_channels_between_those_of_the_kernels_are_padded(named_launches):
    for dims, padded in (((48, 32), (64, 64)), ((100, 72), (128, 128)), ((192, 192), (256, 256))):
        values, rope = arguments(dims), torch.randn(9, 8).bfloat16()
        k = values["k"][..., 8:]
        out, _ = dsa.mha_varlen_fwd(**values | {"k": k}, k_rope=rope)
        [(_, variant, launched)] = named_launches
        named_launches.clear()
        assert variant == (BF16, *padded, 0, False) and launched[2] is None and out.shape == (5, 4, dims[1])
        q, keys, _, v, *_ = launched
        whole = torch.cat((k, rope[:, None].expand(-1, 2, -1)), -1)
        for x, own in ((q, values["q"]), (keys, whole), (v, values["v"])):
            assert torch.equal(x[..., : own.shape[2]], own) and not x[..., own.shape[2] :].any()
        assert (q.shape[2], v.shape[2]) == padded == (keys.shape[2], launched[6].shape[2])


def test_heads_of_a_group_have_their_keys_in_the_l2_cache(named_launches):
    for longest, group in ((6, 128), (2000, 13), (10**6, 1)):
        values = arguments(heads=128, kv_heads=128, max_seqlen_k=longest)
        dsa.mha_varlen_fwd(**values)
        assert named_launches.pop()[2][13] == group
    dsa.mha_varlen_fwd(**arguments(heads=128, kv_heads=4, max_seqlen_k=10**6))
    assert named_launches.pop()[2][13] == 32


def test_rows_that_tma_cannot_read_are_copied(named_launches):
    odd = torch.randn(5, 4, 195).bfloat16()[..., :192]
    dsa.mha_varlen_fwd(**arguments(q=odd, causal=False))
    [(_, _, launched)] = named_launches
    assert launched[0].is_contiguous() and torch.equal(launched[0], odd) and launched[12] == 0


def test_values_without_channels_have_an_lse(named_launches):
    out, lse = dsa.mha_varlen_fwd(**arguments(v=torch.zeros(9, 2, 0, dtype=BF16)))
    [(_, variant, launched)] = named_launches
    assert out.shape == (5, 4, 0) and launched[7] is lse and variant[1:3] == (192, 128)


def test_bits_that_the_kernel_writes(named_launches):
    indices, starts = i32([[1, 2, 3]] * 4)[::2], i32([0, 9, 1, 9])[::2]
    bits = dsa.selection_bits(indices, starts, 129)
    without = dsa.selection_bits(indices, None, 129)
    [(name, variant, launched), (_, other, last)] = named_launches
    assert (name, variant) == ("", (True,)) and launched[0] is indices and launched[1] is starts
    assert launched[2] is bits and launched[3] == 129 and bits.shape == (2, 8)
    assert other == (False,) and last[1] is None and last[2] is without
