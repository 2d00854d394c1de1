"""Choosing the next token from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is continued.

    max_new_tokens  at most this many tokens, the end-of-sequence token included
    temperature     divides the logits; 0 is greedy: the largest logit, ties to the lowest token id
    top_k           sample among the k likeliest tokens; 0 keeps all
    top_p           sample among the fewest tokens whose probabilities reach top_p; 1 keeps all. Applied after top_k
    seed            of the sequence's own random stream: its result does not depend on what else is in the batch.
                    None draws a fresh one
    stop            strings that end the sequence; they are not part of its text
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be a finite number of at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: must be at least 0 and below 2^63, got {self.seed}")
        if any(not text for text in self.stop):
            raise ValueError("stop: strings must not be empty")


def random_stream(params: SamplingParams) -> torch.Generator:
    """The random numbers of one sequence; on the CPU, so that every device draws the same."""
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]) -> list[int]:
    """A token of each row of logits [B, vocab_size], fp32. Raises ValueError if they hold NaN.

    One transfer from the device, and another one of the rows that are not greedy, if any.
    """
    # The maximum of a row that holds a NaN is NaN.
    largest, tokens = logits.max(-1)
    tokens = torch.where(largest.isnan(), -1, tokens).tolist()
    if -1 in tokens:
        raise ValueError("logits: hold NaN; the weights or an activation overflowed")
    drawn = [row for row, one in enumerate(params) if one.temperature > 0]
    if drawn:
        for row, values in zip(drawn, logits[drawn].cpu()):
            tokens[row] = _draw(values, params[row], generators[row])
    return tokens


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    logits, tokens = logits.sort(descending=True, stable=True)
    if params.top_k:
        logits, tokens = logits[: params.top_k], tokens[: params.top_k]
    # Relative to the largest: a tiny temperature must not overflow.
    probabilities = torch.softmax((logits - logits[0]).double() / params.temperature, 0)
    if params.top_p < 1:
        # A token stays while those before it have not reached top_p; the first always stays.
        keep = probabilities.cumsum(0) - probabilities < params.top_p
        probabilities = probabilities * keep
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
