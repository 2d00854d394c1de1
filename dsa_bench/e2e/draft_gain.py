"""What drafts gain in decoding, of what passes take; and what they are to gain."""

from collections.abc import Mapping
from typing import Any

ACCEPTANCE = 0.85  # of a draft behind accepted ones; the papers report 85 to 90% of first drafts
# By sequences, of one draft; and of a verifying pass over what its bytes say it takes beside a plain one.
GAIN = {1: 1.2, 8: 1.2, 32: 1.35, 128: 1.6}
OVER_BYTES = 1.1


def tokens_a_round(drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """1 + p + ... + p^K: a draft counts where all before it are accepted."""
    return sum(acceptance**i for i in range(drafts + 1))


def gain(plain_ms: float, verify_ms: float, draft_ms: float, drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """(tokens a round / (verify + draft)) / (1 / plain): the tokens/s over those without drafts."""
    return tokens_a_round(drafts, acceptance) * plain_ms / (verify_ms + draft_ms)


def missed(row: Mapping[str, Any]) -> dict[str, float]:
    """{"gain" or "over_bytes": its bar} of a row's figures that do not reach it."""
    found = {}
    bar = GAIN.get(row["sequences"]) if row["drafts"] == 1 else None
    if bar is not None and row["gain"] < bar:
        found["gain"] = bar
    if row["over_bytes"] > OVER_BYTES:
        found["over_bytes"] = OVER_BYTES
    return found
