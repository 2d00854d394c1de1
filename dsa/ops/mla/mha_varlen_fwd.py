"""Multi-head attention over packed sequences, to all keys or to selected keys."""

import math

import torch

from dsa.kernels.mla.limits import MHA_DIMS, ROPE_DIMS
from dsa.reference.mla import mha_varlen_fwd as reference
from dsa.reference.mla.selection_bits import KEYS, WORDS
from dsa.runtime import backends
from dsa.runtime.declare import F32, FLOATS, INT32, Arguments, Flag, Int, Number, Tensor, dtype_name, op, tma_rows

__all__ = ["mha_varlen_fwd"]

LOG2E = math.log2(math.e)
L2_BYTES = 16 << 20  # keys and values of the heads that run at once, so that they stay in the L2 cache
MOST_WORDS = 2**31 - 1  # limit of the words in `selected`, because offsets of words are int32


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    k_rope: torch.Tensor | None,
    softmax_scale: float,
    max_seqlen_k: int,
    selected: torch.Tensor | None,
) -> None:
    apart = 0 if k_rope is None else k_rope.shape[1]
    if k.shape[2] + apart != q.shape[2]:
        in_rope = " and no k_rope" if k_rope is None else f" and {apart} in k_rope"
        raise ValueError(f"k: must have q's {q.shape[2]} channels, got {k.shape[2]}{in_rope}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q: heads must be a multiple of k's {k.shape[1]}, at least as many, got {q.shape[1]}")
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale: must be above 0, got {softmax_scale}")
    words = -(-max_seqlen_k // KEYS) * WORDS
    if selected is not None and (selected.shape[1] < words or selected.shape[1] % WORDS):
        raise ValueError(
            f"selected: must have a multiple of {WORDS} words a query, at least {words} of "
            f"max_seqlen_k={max_seqlen_k} keys, got {selected.shape[1]}"
        )


MHA_VARLEN_FWD = Arguments(
    rule=_check,
    q=Tensor("Tq H d", FLOATS),
    k=Tensor("Tk Hk dk", FLOATS, like="q"),
    v=Tensor("Tk Hk dv", FLOATS, like="q"),
    cu_seqlens_q=Tensor("B+1", INT32),
    cu_seqlens_k=Tensor("B+1", INT32),
    max_seqlen_k=Int(least=0),
    softmax_scale=Number(),
    causal=Flag(),
    k_rope=Tensor("Tk dr", FLOATS, like="q", optional=True),
    selected=Tensor("Tq words", INT32, optional=True),
    dense_keys=Int(least=0),
    attn_sink=Tensor("H", F32, optional=True),
)


def mha_varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    *,
    k_rope: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    dense_keys: int = 0,
    attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(softmax_scale * q[t, h] . k[j, h']) v[j, h'], h' = h // (H / Hk), over the keys j
    that query t sees. These are the Lk keys of the query's sequence; if `causal`, query i of the sequence's Lq queries
    sees only the first Lk - Lq + i + 1 keys (the last query sees all); and with `selected`, only the selected ones.

    q              [Tq, H, d] bf16 or fp16; fp32 runs the PyTorch reference, with a warning on Hopper
    k, v           [Tk, Hk, d] and [Tk, Hk, dv] in q's dtype, H a multiple of Hk; they may be slices of one tensor
    k_rope         [Tk, dr] or None: the last dr of a key's d channels, if they are the same for all heads; k then has d
                   - dr channels
    cu_seqlens_q   [B + 1] int32, not decreasing: sequence b has the queries cu_seqlens_q[b] up to cu_seqlens_q[b + 1]
    cu_seqlens_k   [B + 1] int32, likewise for the keys; a sequence may have more keys than queries, for example with a
                   cached prefix
    max_seqlen_k   at least the number of keys of the longest sequence. It determines the order of work, and how many
                   words `selected` must have
    softmax_scale  multiplies the logits: a finite number above 0
    selected       [Tq, words] int32, from `selection_bits`, or None: all keys are selected
    dense_keys     with `selected`: for a query that sees at most this many keys, the op takes all of them as selected
                   and does not read the query's words in `selected`
    attn_sink      [H] fp32 or None, any value from -inf to +inf: out is scaled by e^lse / (e^lse + e^sink)

    Returns out [Tq, H, dv] in q's dtype and lse [H, Tq] fp32 (natural log, without the sink). A query without keys has
    out 0 and lse +inf. The results of a query that belongs to no sequence are unspecified. Infinities and NaN in v
    reach all queries of the sequence. Differentiable: if a gradient is asked for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices. Bounds that decrease or lie outside the
    tensors raise no error: a sequence with these bounds counts as one without queries or keys, and the results of other
    sequences are right.
    On Hopper: (d, dv) = (64, 64), (128, 128), (192, 128) as in DeepSeek-V3.2, or (256, 256) as in GLM-5; the last two
    also with a k_rope of 64 channels. Other sizes up to (256, 256) are padded. Any strides; tensors whose rows are not
    at multiples of 16 bytes are copied. (Tq + 8) * words, the size of `selected` with 8 more queries, is below 2^31.
    Logits and sums are fp32; softmax weights are rounded to q's dtype before the values are multiplied by them. One
    kernel for the attention, and one that zeroes a counter. Deterministic, and a query's result does not depend on the
    other queries, bit for bit. CUDA-graph safe, no host synchronisation.
    Source: FlashAttention's `flash_attn_varlen_func`; the selection is DeepSeek-V3.2's.
    """
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_k
    return _mha_varlen_fwd(q, k, v, *sequences, softmax_scale, causal, k_rope, selected, dense_keys, attn_sink)


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _check_kernel(q: torch.Tensor, v: torch.Tensor, selected: torch.Tensor | None) -> None:
    if _dims(q, v) is None:
        raise ValueError(
            f"q, v: the kernel takes up to (d, dv) = {MHA_DIMS[-1]} channels, got {(q.shape[2], v.shape[2])}"
        )
    if selected is not None and (len(selected) + 8) * selected.shape[1] > MOST_WORDS:
        raise ValueError(
            f"selected: the kernel takes at most {MOST_WORDS} words, of 8 queries more than there are, got "
            f"{list(selected.shape)}"
        )


def _dims(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int] | None:
    """Return (d, dv) of the smallest kernel that fits."""
    return next((dims for dims in MHA_DIMS if q.shape[2] <= dims[0] and v.shape[2] <= dims[1]), None)


@op(
    arguments=MHA_VARLEN_FWD,
    reference=reference.mha_varlen_fwd,
    results=_results,
    rule=_check_kernel,
    differentiable=True,
    dtypes=(torch.bfloat16, torch.float16),
)
def _mha_varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    k_rope: torch.Tensor | None,
    selected: torch.Tensor | None,
    dense_keys: int,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.mla.mha_varlen_fwd_sm90 import CONFIGS, compile_mha_varlen_fwd

    out, lse = _results(q, v)
    if lse.numel() == 0:
        return out, lse
    nothing_selected = selected is not None and selected.shape[1] == 0
    if len(k) == 0 or len(cu_seqlens_q) == 1 or nothing_selected:
        return out.zero_(), lse.fill_(torch.inf)
    dim, value_dim = dims = _dims(q, v)
    exact = dims == (q.shape[2], v.shape[2])
    if k_rope is not None and not (exact and ROPE_DIMS.get(dims) == k_rope.shape[1]):
        k, k_rope = torch.cat((k, k_rope[:, None].expand(-1, k.shape[1], -1)), -1), None
    results = out
    if not exact:
        q, k, v = (torch.nn.functional.pad(x, (0, n - x.shape[2])) for x, n in ((q, dim), (k, dim), (v, value_dim)))
        results = _results(q, v)[0]
    heads, kv_heads = q.shape[1], k.shape[1]
    key_bytes = max(max_seqlen_k, 1) * (dim + value_dim) * k.element_size()
    group = max(1, min(kv_heads, L2_BYTES // key_bytes)) * (heads // kv_heads)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    rope = None if k_rope is None else tma_rows(k_rope[:, None])
    rope_dim = 0 if rope is None else rope.shape[2]
    kind = dtype_name(q.dtype), CONFIGS[dims], rope_dim
    launch = compile_mha_varlen_fwd(*kind, selected is not None, attn_sink is not None)
    bits, sinks = (None if x is None else x.contiguous() for x in (selected, attn_sink))
    launch(
        *(tma_rows(q), tma_rows(k), rope, tma_rows(v)),
        *(x.contiguous() for x in (cu_seqlens_q, cu_seqlens_k)),
        *(results, lse, sinks, bits, None if bits is None else dense_keys, counter),
        *(softmax_scale * LOG2E, int(causal), group, backends.num_sms(q.device)),
    )
    return (results if exact else out.copy_(results[..., : out.shape[2]])), lse
