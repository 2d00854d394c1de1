"""`mha_varlen_fwd` on the CPU: padding of channels, groups of heads, and copies."""

import torch

import dsa
from dsa.kernels.mla.mha_varlen_fwd_sm90 import CONFIGS

BF16 = torch.bfloat16


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def arguments(dims=(192, 128), heads=4, kv_heads=2, dtype=BF16, **changed):
    given = {"q": torch.randn(5, heads, dims[0]).to(dtype), "k": torch.randn(9, kv_heads, dims[0]).to(dtype)}
    given |= {"v": torch.randn(9, kv_heads, dims[1]).to(dtype), "cu_seqlens_q": i32([0, 2, 5])}
    given |= {"cu_seqlens_k": i32([0, 3, 9]), "max_seqlen_k": 6, "softmax_scale": 0.1}
    return given | changed


def test_channels_between_those_of_the_kernels_are_padded(named_launches):
    for dims, padded in (((48, 32), (64, 64)), ((100, 72), (128, 128)), ((192, 192), (256, 256))):
        values, rope = arguments(dims), torch.randn(9, 8).bfloat16()
        k = values["k"][..., 8:]
        out, _ = dsa.mha_varlen_fwd(**values | {"k": k}, k_rope=rope)
        [(_, variant, launched)] = named_launches
        named_launches.clear()
        assert variant == ("bfloat16", CONFIGS[padded], 0, False, False)
        assert launched[2] is None and out.shape == (5, 4, dims[1])
        q, keys, _, v, *_ = launched
        whole = torch.cat((k, rope[:, None].expand(-1, 2, -1)), -1)
        for x, own in ((q, values["q"]), (keys, whole), (v, values["v"])):
            assert torch.equal(x[..., : own.shape[2]], own) and not x[..., own.shape[2] :].any()
        assert (q.shape[2], v.shape[2]) == padded == (keys.shape[2], launched[6].shape[2])


def test_heads_of_a_group_have_their_keys_in_the_l2_cache(named_launches):
    for longest, group in ((6, 128), (2000, 13), (10**6, 1)):
        values = arguments(heads=128, kv_heads=128, max_seqlen_k=longest)
        dsa.mha_varlen_fwd(**values)
        assert named_launches.pop()[2][14] == group
    dsa.mha_varlen_fwd(**arguments(heads=128, kv_heads=4, max_seqlen_k=10**6))
    assert named_launches.pop()[2][14] == 32


def test_rows_that_tma_cannot_read_are_copied(named_launches):
    odd = torch.randn(5, 4, 195).bfloat16()[..., :192]
    dsa.mha_varlen_fwd(**arguments(q=odd, causal=False))
    [(_, _, launched)] = named_launches
    assert launched[0].is_contiguous() and torch.equal(launched[0], odd) and launched[13] == 0


def test_sinks_have_a_kernel(named_launches):
    sinks = torch.randn(4, 2)[:, 0]
    dsa.mha_varlen_fwd(**arguments(attn_sink=sinks))
    [(_, variant, launched)] = named_launches
    assert variant[-1] is True and launched[8].is_contiguous() and torch.equal(launched[8], sinks)


def test_values_without_channels_have_an_lse(named_launches):
    out, lse = dsa.mha_varlen_fwd(**arguments(v=torch.zeros(9, 2, 0, dtype=BF16)))
    [(_, variant, launched)] = named_launches
    assert out.shape == (5, 4, 0) and launched[7] is lse and variant[1] == CONFIGS[192, 128]
