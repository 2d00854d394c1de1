"""Choosing the next token from logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsa_layers.arguments import integer, number, shown


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is continued.

    max_new_tokens  at most this many tokens, the end-of-sequence token included
    temperature     divides the logits; 0 is greedy: the largest logit, ties to the lowest token id
    top_k           sample among the k likeliest tokens; 0 keeps all
    top_p           sample among the fewest tokens whose probabilities reach top_p; 1 keeps all. Applied after top_k
    seed            of the sequence's own random stream: its result does not depend on what else is in the batch.
                    None draws a fresh one
    stop            strings that end the sequence; they are not part of its text. A string that is not in a list is one
                    stop string, as vLLM and transformers take it. None: no strings

    Raises TypeError or ValueError that names the parameter. Numbers may be numpy's; a bool is no number.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()

    def __post_init__(self) -> None:
        checked = {
            "max_new_tokens": integer("max_new_tokens", self.max_new_tokens, at_least=1),
            "temperature": number("temperature", self.temperature),
            "top_k": integer("top_k", self.top_k),
            "top_p": number("top_p", self.top_p),
            "seed": self.seed if self.seed is None else integer("seed", self.seed),
            "stop": _stop_strings(self.stop),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be a finite number of at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: must be at least 0 (0 keeps all tokens), got {shown(self.top_k)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: must be at least 0 and below 2^63, got {shown(self.seed)}")


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or isinstance(strings, bytes | bytearray):
        raise TypeError(f"stop: must be a string or a list of strings, got {shown(stop)}")
    for i, text in enumerate(strings):
        if not isinstance(text, str):
            raise TypeError(f"stop[{i}]: must be a string, got {shown(text)}")
        if not text:
            raise ValueError(f"stop[{i}]: must not be empty, got ''")
    return tuple(strings)


def random_stream(params: SamplingParams) -> torch.Generator:
    """The random numbers of one sequence; on the CPU, so that every device draws the same."""
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int | None]:
    """A token of each row of logits [B, vocab_size], fp32; None for a row that no token can be chosen from, because it
    holds a NaN or an infinity, or nothing but minus infinity. Other rows are chosen as they are without it. Single
    tokens of minus infinity are never drawn.

    One transfer from the device, and another one of the rows that are not greedy, if any.
    """
    return [token for (token,) in sample_drafted(logits[:, None], [()] * len(params), params, generators)]


def sample_drafted(
    logits: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
) -> list[list[int | None]]:
    """The tokens that `sample` chooses for each of B sequences one after another, as far as logits go.

    logits fp32 [B, n, vocab_size]: after the sequence, and after its first 1 to n - 1 drafts; drafts: n - 1 of each. A
    sequence's tokens end with the first that is not its draft, behind which no logits are, or with None. So a draft is
    taken with the probability that the model gives it, and tokens are those without drafts, sampled ones too.
    """
    # The maximum of a row that holds a NaN is NaN.
    largest, best = logits.max(-1)
    greedy: list[list[int]] = torch.where(largest.isfinite(), best, -1).tolist()
    drawn = [row for row, one in enumerate(params) if one.temperature > 0 and greedy[row][0] >= 0]
    values = dict(zip(drawn, logits[drawn].cpu() if drawn else ()))
    found = []
    for row, guesses in enumerate(drafts):
        tokens: list[int | None] = []
        for i, token in enumerate(greedy[row]):
            if token < 0:
                tokens.append(None)
                break
            if row in values:
                token = _draw(values[row][i], params[row], generators[row])
            tokens.append(token)
            if i < len(guesses) and token != guesses[i]:
                break
        found.append(tokens)
    return found


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    logits, tokens = logits.sort(descending=True, stable=True)
    if params.top_k:
        logits, tokens = (x[: min(params.top_k, len(x))] for x in (logits, tokens))
    # Relative to the largest: a tiny temperature must not overflow.
    probabilities = torch.softmax((logits - logits[0]).double() / params.temperature, 0)
    if params.top_p < 1:
        # A token stays while those before it have not reached top_p; the first always stays.
        keep = probabilities.cumsum(0) - probabilities < params.top_p
        probabilities = probabilities * keep
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
