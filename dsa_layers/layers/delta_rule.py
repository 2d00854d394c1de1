"""Kimi delta attention's recurrence over packed sequences, in PyTorch."""

from collections.abc import Sequence

import torch

CHUNK = 32  # tokens that are computed together; a larger chunk costs more work per token but needs fewer steps


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    lens: Sequence[int],
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute o_t = S_t^T q_t per head and token t of a sequence, with D = diag(e^{decay_t}) and the recurrent state
    S_t = D S_{t-1} + beta_t k_t (v_t - k_t^T D S_{t-1})^T.

    q, k    [T, heads, d]: queries and keys
    v       [T, heads, dv]: values
    decay   [T, heads, d]: log of the decay, at most 0
    beta    [T, heads]
    lens    numbers of tokens of B sequences; T is their sum
    states  S before each sequence's tokens, [B, heads, d, dv]; None for zeros

    Returns (o [T, heads, dv], S after each sequence's tokens [B, heads, d, dv]), both fp32. Differentiable.
    Source: Kimi Linear's report (arXiv 2510.26692), section 3.
    """
    heads, dim = k.shape[1:]
    if states is None:
        states = k.new_zeros(len(lens), heads, dim, v.shape[-1])
    states = states.float()
    inputs = [x.float().transpose(0, 1) for x in (q, k, v, decay)]
    if len(set(lens)) == 1:  # one call for all sequences
        by_sequence = [x.unflatten(1, (len(lens), -1)).transpose(0, 1) for x in inputs]
        out, last = _in_chunks(*by_sequence, beta.float().T.unflatten(1, (len(lens), -1)).transpose(0, 1), states)
        return out.transpose(1, 2).flatten(0, 1), last
    parts = [x.split([*lens], 1) for x in (*inputs, beta.float().T)]
    found = [_in_chunks(*own, state) for *own, state in zip(*parts, states)]
    outs = [out.transpose(0, 1) for out, _ in found]
    return (torch.cat(outs) if outs else v.float()), torch.stack([last for _, last in found]) if found else states


def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule` for sequences of equal lengths: q, k, decay [..., heads, tokens, d], v [..., heads, tokens, dv],
    beta [..., heads, tokens], state [..., heads, d, dv]."""
    out = []
    for q_c, k_c, v_c, decay_c, beta_c in zip(*(x.split(CHUNK, -2) for x in (q, k, v, decay)), beta.split(CHUNK, -1)):
        tokens = k_c.shape[-2]
        # Until token i reads S, the update of token j decays by the factor between[i, j], and S from before the chunk
        # by since[i].
        total = decay_c.cumsum(-2)
        since = total.exp()
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        between = total[..., :, None, :] - total[..., None, :, :]
        between = between.masked_fill(later[..., None], -torch.inf).exp()
        overlap = beta_c[..., None] * torch.einsum("...id,...jd,...ijd->...ij", k_c, k_c, between)
        # Token i adds k_i u_i^T to S, where u (`added`) solves (1 + tril(overlap, -1)) u = beta (v - (k * since) S).
        right = beta_c[..., None] * (v_c - (k_c * since) @ state)
        added = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
        read = torch.einsum("...id,...jd,...ijd->...ij", q_c, k_c, between)
        out.append((q_c * since) @ state + read @ added)
        left = (total[..., -1:, :] - total).exp()
        state = since[..., -1, :, None] * state + (k_c * left).transpose(-1, -2) @ added
    return (torch.cat(out, -2) if out else v), state
