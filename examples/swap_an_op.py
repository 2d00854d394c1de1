"""Swap one op of your own attention: latent attention over selected keys, in plain PyTorch and by dsa.

usage: python examples/swap_an_op.py
"""

import torch

import dsa

TOKENS, KEYS, HEADS, LATENT, ROPE, TOP_K = 32, 512, 16, 512, 64, 128


def attend_in_pytorch(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * q k) v over each token's selected keys. q [T, H, 576], kv [S, 576], indices [T, K]."""
    keys = kv[indices.clamp(min=0).long()]  # [T, K, 576]: a copy of every selected key
    logits = torch.einsum("thd,tkd->thk", q.float(), keys.float()) * scale
    logits = logits.masked_fill((indices < 0)[:, None], -torch.inf)
    return torch.einsum("thk,tkd->thd", logits.softmax(-1), keys[..., :LATENT].float()).to(q.dtype)


def attend_by_dsa(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    """The same, without a copy of the keys."""
    out, _, _ = dsa.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], scale)
    return out


def select(kv: torch.Tensor, device: str) -> torch.Tensor:
    """The keys with the best index scores, causally: int32 [T, K], -1 where a token has fewer keys."""
    q_index = torch.randn(TOKENS, 64, 128, device=device).to(torch.float8_e4m3fn)
    k_index, k_scale = dsa.per_token_cast_to_fp8(kv[:, :128].contiguous())
    weights = torch.rand(TOKENS, 64, device=device)
    starts = torch.zeros(TOKENS, dtype=torch.int32, device=device)
    ends = torch.arange(KEYS - TOKENS + 1, KEYS + 1, dtype=torch.int32, device=device)
    scores = dsa.fp8_mqa_logits(q_index, (k_index, k_scale.squeeze(1)), weights, starts, ends)
    return dsa.topk_indices(scores, TOP_K, starts=starts, lengths=ends)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q = torch.randn(TOKENS, HEADS, LATENT + ROPE, device=device, dtype=torch.bfloat16) / 10
    kv = torch.randn(KEYS, LATENT + ROPE, device=device, dtype=torch.bfloat16) / 10
    indices, scale = select(kv, device), (LATENT + ROPE) ** -0.5
    expected, got = (attend(q, kv, indices, scale) for attend in (attend_in_pytorch, attend_by_dsa))
    error = (got - expected).abs().max().item()
    print(f"{TOKENS} tokens, {HEADS} heads, {TOP_K} of {KEYS} keys on {device}: largest difference {error:.2g}")
    assert error < 2e-3, "bf16 rounding explains less"


if __name__ == "__main__":
    main()
