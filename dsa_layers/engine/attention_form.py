"""Which form a prefill's attention over selected keys takes: multi-head, over every head's keys and values with a mask,
or absorbed, over the latents that all heads share, of the selected keys alone. Results are the same up to rounding.

Multi-head attention visits every visible key, but has 320 multiply-adds a query, key and head where absorbed attention
has 1088 (DeepSeek-V3.2); so it is the faster one while a sequence has few times top_k keys. Only lengths decide.

Where several processes have few heads each (`splits_tokens`), they split the multi-head form by heads and the absorbed
one by queries. What a process computes is the same part of either. But by heads it needs the others' queries and what
these selected, and adds up results (`Communication`): of V3.2 on 8 GPUs that takes 0.1 microseconds a token, and the
whole absorbed form 0.13. So the absorbed form is the faster one for more lengths, and of many processes for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Multiply-adds a microsecond, measured on an H200: of multi-head attention with a mask, of absorbed attention, and of
# the products that make keys and values of latents (FP8) and that absorb projections (16 bits).
MULTI_HEAD, ABSORBED, EXPANDING, ABSORBING = 285e6, 300e6, 600e6, 330e6
# Of what several processes say to each other, on two H200s with NVLink: microseconds of a collective of few bytes, and
# bytes a microsecond that a process gets of many, the copies around included.
LATENCY, BANDWIDTH = 20.0, 210e3
EXPANDED_BYTES = 2 << 30  # that keys and values of 16 bits, made of latents, take at most where the other form is there


@dataclass(frozen=True)
class HeadSizes:
    """heads; channels of a head's keys without and with rope, of its values, and of a latent."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int


@dataclass(frozen=True)
class Communication:
    """What the multi-head form, split by heads, says that the absorbed form, split by queries, does not.

    token_bytes  of a new token: the latents of its queries and the numbers of the keys that it selects, which go to all
                 of the `processes`, and its result, of which all have a part that goes to one. So of either a process
                 gets what (processes - 1) / processes of all tokens have
    collectives  how many there are
    """

    processes: int
    token_bytes: int
    collectives: int

    def microseconds(self, tokens: int) -> float:
        """Of a pass of so many new tokens."""
        from_others = tokens * self.token_bytes * (self.processes - 1) / self.processes
        return self.collectives * LATENCY + from_others / BANDWIDTH


def multi_head_is_faster(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    top_k: int,
    sizes: HeadSizes,
    communication: Communication | None = None,
) -> bool:
    """And has memory for all heads' keys and values: of a few new tokens of many sequences each they may be many.

    query_lens, key_lens: new tokens of each sequence, and all of its tokens, of which the new ones are the last.
    sizes: of several processes with the heads of one. communication: None where both forms say the same, or nothing.
    """
    if 2 * sum(key_lens) * sizes.heads * (sizes.nope + sizes.value) > EXPANDED_BYTES:
        return False
    visible = sum(map(visible_keys, query_lens, key_lens))
    selected = visible - sum(_beyond(new, total, top_k) for new, total in zip(query_lens, key_lens))
    projected = sizes.heads * (sizes.nope + sizes.value) * sizes.latent
    multi_head = visible * sizes.heads * (sizes.nope + sizes.rope + sizes.value) / MULTI_HEAD
    absorbed = selected * sizes.heads * (2 * sizes.latent + sizes.rope) / ABSORBED
    expanding, absorbing = sum(key_lens) * projected / EXPANDING, sum(query_lens) * projected / ABSORBING
    saying = 0.0 if communication is None else communication.microseconds(sum(query_lens))
    return multi_head + expanding + saying < absorbed + absorbing


def visible_keys(new: int, total: int) -> int:
    """Of all new tokens together: the first sees total - new + 1, the last one all."""
    return new * (total - new) + new * (new + 1) // 2


def _beyond(new: int, total: int, top_k: int) -> int:
    """Those of them that a token sees beyond top_k: 1, 2, ... of the tokens behind the first top_k."""
    last = max(total - top_k, 0)
    first = max(total - new - top_k, 0)
    return last * (last + 1) // 2 - first * (first + 1) // 2
