"""Stubs of Marlin's operators, because the real ones need a GPU. They have the operators' arguments, assert what the
operators' host code checks, and compute the results with plain PyTorch.

The stubs read Marlin's layouts through tables. The tables follow from the registers that hold an MMA's operands.
`marlin.pack` writes the same layouts without these tables, by permuting dimensions.
"""

import types
from functools import lru_cache

import torch

from tests.bench.peer_stubs import SMS

INT = torch.int32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_ID = 0x2000000010102
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # for each nibble of a word, lowest first: the index in `codes` (`_codes_order`)


@lru_cache
def _codes_order() -> torch.Tensor:
    """Return int64 [1024]: for each nibble of a block of 16 channels and 64 rows, the index of the nibble's code. The
    codes are [4 tiles of 16 rows, 16 channels, 16 rows], flattened."""
    order = []
    for thread in range(32):
        row, pair = thread // 4, 2 * (thread % 4)
        codes = [16 * channel + row + 8 * half for half in (0, 1) for channel in (pair, pair + 1, pair + 8, pair + 9)]
        for tile in range(4):
            order.extend(256 * tile + codes[i] for i in NIBBLES)
    return torch.tensor(order)


@lru_cache
def _scales_order() -> torch.Tensor:
    """Return int64 [64]: the row of each of 64 adjacent scales. Within four scales, the middle two are exchanged."""
    by_thread = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    return by_thread.view(-1, 4)[:, [0, 2, 1, 3]].flatten()


def unpacked(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    count, tiles, words = weight.shape
    rows = words // 2
    bits = torch.arange(0, 32, 4, dtype=INT)
    nibbles = (weight[..., None] >> bits & 15).view(count, tiles, rows // 64, 1024)
    codes = torch.empty_like(nibbles)
    codes[..., _codes_order()] = nibbles
    codes = codes.view(count, tiles, rows // 16, 16, 16).permute(0, 2, 4, 1, 3).reshape(count, rows, tiles * 16)
    stored = scale.float().view(count, -1, rows // 64, 64)
    scales = torch.empty_like(stored)
    scales[..., _scales_order()] = stored
    return E2M1[codes] * scales.view(count, -1, rows).mT.repeat_interleave(32, -1)


def _align(topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, expert_map, scatter):
    assert expert_map is None and scatter is None and num_experts < 992 and topk_ids.is_contiguous()
    assert topk_ids.dim() == 2 and topk_ids.dtype in (torch.int64, INT)
    for out in (sorted_token_ids, experts_ids, num_tokens_post_pad):
        assert out.dtype == INT and out.is_contiguous() and out.dim() == 1
    chosen = topk_ids.flatten()
    sorted_token_ids.fill_(len(chosen))
    experts_ids.fill_(-1)
    end = 0
    for expert in range(num_experts):
        rows = (chosen == expert).nonzero().flatten().flip(0)  # reversed, because the operator guarantees no order
        sorted_token_ids[end : end + len(rows)] = rows.to(INT)
        blocks = -(-len(rows) // block_size)
        experts_ids[end // block_size : end // block_size + blocks] = expert
        end += blocks * block_size
    assert end <= len(sorted_token_ids) and end // block_size <= len(experts_ids) and len(num_tokens_post_pad) == 1
    num_tokens_post_pad.fill_(end)


def _gemm(
    a,
    c,
    b_q_weight,
    b_bias,
    b_scales,
    a_scales,
    global_scale,
    b_zeros,
    workspace,
    sorted_token_ids,
    expert_ids,
    num_tokens_past_padded,
    topk_weights,
    moe_block_size,
    top_k,
    mul_topk_weights,
    b_type_id,
    size_m,
    size_n,
    size_k,
    use_atomic_add,
    use_fp32_reduce,
    is_zp_float,
    thread_k,
    thread_n,
    blocks_per_sm,
):
    assert b_bias is None and a_scales is None and global_scale is None and b_zeros is None and b_type_id == E2M1_ID
    assert (use_atomic_add, use_fp32_reduce, is_zp_float) == (False, True, False)
    assert (thread_k, thread_n, blocks_per_sm) == (-1, -1, -1) and moe_block_size in (8, 16, 32, 48, 64)
    assert a.dtype == torch.bfloat16 and a.shape == (size_m, size_k) and a.is_contiguous()
    assert c.dtype == a.dtype and c.shape == (size_m * top_k, size_n) and c.is_contiguous()
    assert b_q_weight.dtype == INT and b_q_weight.is_contiguous()
    assert b_q_weight.shape == (len(b_q_weight), size_k // 16, 2 * size_n)
    assert b_scales.dtype == torch.float8_e8m0fnu and b_scales.is_contiguous()
    assert b_scales.shape == (len(b_q_weight), size_k // 32, size_n)
    assert (size_n % 64 == 0 and size_k % 128 == 0) or (size_n % 128 == 0 and size_k % 64 == 0)
    assert workspace.dtype == INT and workspace.numel() >= 4 * SMS and not workspace.any()
    assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
    assert topk_weights.numel() == size_m * top_k
    matrices = unpacked(b_q_weight, b_scales)
    c.fill_(torch.nan)
    for block in range(num_tokens_past_padded.item() // moe_block_size):
        rows = sorted_token_ids[block * moe_block_size :][:moe_block_size]
        rows = rows[rows < size_m * top_k].long()
        product = a[rows // top_k].float() @ matrices[expert_ids[block]].mT
        if mul_topk_weights:
            product *= topk_weights.view(-1)[rows, None]
        c[rows] = product.to(c.dtype)
    return c


def _sum(input, output, topk_ids, expert_map):
    assert topk_ids is None and expert_map is None and output.is_contiguous() and input.stride(-1) == 1
    assert input.dtype == output.dtype and output.shape == (len(input), input.shape[2])
    output.copy_(input.float().sum(1))


def operators() -> types.SimpleNamespace:
    return types.SimpleNamespace(moe_align_block_size=_align, moe_wna16_marlin_gemm=_gemm, moe_sum=_sum)


def silu_and_mul(result, input):
    _swiglu(result, *input.float().chunk(2, -1))


def silu_and_mul_with_clamp(result, input, limit, alpha, beta):
    assert (alpha, beta) == (1.0, 0.0)
    gate, up = input.float().chunk(2, -1)
    _swiglu(result, gate.clamp(max=limit), up.clamp(-limit, limit))


def _swiglu(result, gate, up):
    assert result.dtype == torch.bfloat16 and result.is_contiguous() and result.shape == gate.shape
    result.copy_(torch.nn.functional.silu(gate) * up)
