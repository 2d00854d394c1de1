"""What drafts gain in decoding, from the times of passes."""

ACCEPTANCE = 0.85  # of a draft behind accepted ones; the papers report 85 to 90% of first drafts


def tokens_a_round(drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """1 + p + ... + p^K: a draft counts where all before it are accepted."""
    return sum(acceptance**i for i in range(drafts + 1))


def gain(plain_ms: float, verify_ms: float, draft_ms: float, drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """(tokens a round / (verify + draft)) / (1 / plain): the tokens/s over those without drafts."""
    return tokens_a_round(drafts, acceptance) * plain_ms / (verify_ms + draft_ms)
