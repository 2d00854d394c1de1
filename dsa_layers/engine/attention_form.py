"""The choice between two forms of a prefill's attention to selected keys, which are equal up to rounding.

The multi-head form reads every head's keys and values of all visible tokens, with a mask. The absorbed form reads the
latents, which all heads share, of the selected keys. The multi-head form visits more keys, but needs 320 multiply-adds
per query, key and head instead of 1088 (DeepSeek-V3.2). So it is faster while a sequence has at most a few times top_k
keys. The choice depends on the lengths only.

Ranks with few heads each split the multi-head form by heads and the absorbed form by queries. A rank computes the same
fraction of either form. But the split by heads exchanges queries, selections and results (`Communication`): for V3.2 on
8 GPUs this takes 0.1 microseconds per token, and the whole absorbed form takes 0.13. So with many ranks the absorbed
form is always faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Multiply-adds per microsecond, measured on an H200: masked multi-head attention, absorbed attention, the FP8 products
# that expand latents to keys and values, and the 16-bit products that absorb the projections.
MULTI_HEAD, ABSORBED, EXPANDING, ABSORBING = 285e6, 300e6, 600e6, 330e6
# Collectives on two H200s with NVLink: microseconds for few bytes, and bytes per microsecond that a rank receives,
# including the copies around them.
LATENCY, BANDWIDTH = 20.0, 210e3
EXPANDED_BYTES = 2 << 30  # limit for the keys and values of all heads in 16 bits; above it the form is absorbed


@dataclass(frozen=True)
class HeadSizes:
    """heads, and channels: of a head's keys without and with rope, of its values, and of a latent."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int


@dataclass(frozen=True)
class Communication:
    """What ranks exchange for the multi-head form, split by heads, and not for the absorbed form, split by queries.

    token_bytes  bytes of a new token's query latents and selected keys, which go to all ranks, and of its result, whose
                 parts go to one rank. Of each a rank receives (processes - 1) / processes
    collectives  their number
    """

    processes: int
    token_bytes: int
    collectives: int

    def microseconds(self, tokens: int) -> float:
        """The time in a pass over this many new tokens."""
        from_others = tokens * self.token_bytes * (self.processes - 1) / self.processes
        return self.collectives * LATENCY + from_others / BANDWIDTH


def multi_head_is_faster(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    top_k: int,
    sizes: HeadSizes,
    communication: Communication | None = None,
) -> bool:
    """Whether the multi-head form is faster and the keys and values of all heads have room in memory.

    query_lens, key_lens: new tokens of each sequence, and all its tokens. sizes: with the heads of one rank.
    communication: None if both forms exchange the same.
    """
    if 2 * sum(key_lens) * sizes.heads * (sizes.nope + sizes.value) > EXPANDED_BYTES:
        return False
    visible = sum(map(visible_keys, query_lens, key_lens))
    selected = visible - sum(_beyond(new, total, top_k) for new, total in zip(query_lens, key_lens))
    projected = sizes.heads * (sizes.nope + sizes.value) * sizes.latent
    multi_head = visible * sizes.heads * (sizes.nope + sizes.rope + sizes.value) / MULTI_HEAD
    absorbed = selected * sizes.heads * (2 * sizes.latent + sizes.rope) / ABSORBED
    expanding, absorbing = sum(key_lens) * projected / EXPANDING, sum(query_lens) * projected / ABSORBING
    exchanging = 0.0 if communication is None else communication.microseconds(sum(query_lens))
    return multi_head + expanding + exchanging < absorbed + absorbing


def visible_keys(new: int, total: int) -> int:
    """The number of pairs of a new token and a key that it sees, for the last `new` of `total` tokens."""
    return new * (total - new) + new * (new + 1) // 2


def _beyond(new: int, total: int, top_k: int) -> int:
    """The number of these pairs that selection leaves out. The token at position p leaves out p + 1 - top_k keys."""
    last = max(total - top_k, 0)
    first = max(total - new - top_k, 0)
    return last * (last + 1) // 2 - first * (first + 1) // 2
