"""Choosing the next token from logits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsa_layers.arguments import integer, number, shown
from dsa_layers.batch import packing
from dsa_layers.generation.draws import RandomStream, draw, draw_of_likeliest

# Sequences on a GPU: a draw takes ten times the memory of their logits. On a CPU a single one stays in its caches.
_AT_ONCE = 8
MOST_SEQUENCES = 16384  # of one prompt, as in vLLM
_LEAST_REPETITION = 1e-3  # a far smaller one would make logits infinite


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is continued.

    max_tokens      at most this many tokens, the end-of-sequence token included
    temperature     divides the logits; 0 is greedy: the largest logit, ties to the lowest token id
    top_k           sample among the k likeliest tokens; 0 keeps all
    top_p           sample among the fewest tokens whose probabilities reach top_p; 1 keeps all. Applied after top_k
    seed            of the sequence's own random stream: its result does not depend on what else is in the batch.
                    Where one SamplingParams is given for many prompts, prompt i draws by seed + i. None draws a fresh
                    one
    stop            strings that end the sequence; they are not part of its text. Special tokens have no text, so that
                    their names never match. A string that is not in a list is one stop string, as vLLM and
                    transformers take it. None: no strings
    n               sequences that continue each prompt; the k-th one draws by seed + k. With prefix_cache they share
                    the prompt's pages. Greedy ones would be equal: accepted with a temperature above 0
    min_p           drop tokens less likely than min_p times the likeliest one; 0 keeps all
    repetition_penalty  logits of tokens in the prompt or generated before are divided by it where they are positive,
                    else multiplied; above 0, and 1 changes nothing
    frequency_penalty   is subtracted from a token's logit as often as it was generated; from -2 to 2
    presence_penalty    is subtracted from the logit of a token that was generated; from -2 to 2
    logprobs        of each generated token its log-probability and those of so many of the likeliest tokens; 0: its
                    own alone; None: none. By the model's logits, before penalties and temperature

    Names and meanings are vLLM's. Penalties come first, also where the choice is greedy, then temperature, min_p, top_k
    and top_p.

    Raises TypeError or ValueError that names the parameter. Numbers may be numpy's; a bool is no number.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        checked = {
            "max_tokens": integer("max_tokens", self.max_tokens, at_least=1),
            "temperature": number("temperature", self.temperature),
            "top_k": integer("top_k", self.top_k),
            "top_p": number("top_p", self.top_p),
            "seed": self.seed if self.seed is None else integer("seed", self.seed),
            "stop": _stop_strings(self.stop),
            "n": integer("n", self.n, at_least=1, at_most=MOST_SEQUENCES),
            "min_p": number("min_p", self.min_p),
            "repetition_penalty": number("repetition_penalty", self.repetition_penalty),
            "presence_penalty": number("presence_penalty", self.presence_penalty),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty),
            "logprobs": self.logprobs if self.logprobs is None else integer("logprobs", self.logprobs, at_least=0),
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
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: must be at least 0 and at most 1, got {self.min_p}")
        if not _LEAST_REPETITION <= self.repetition_penalty <= 1 / _LEAST_REPETITION:
            accepted = f"above 0, from {_LEAST_REPETITION:g} to {1 / _LEAST_REPETITION:g}"
            raise ValueError(f"repetition_penalty: must be {accepted}, got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}: must be at least -2 and at most 2, got {getattr(self, name)}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n: must be 1 with temperature 0, which is greedy, got {shown(self.n)}")

    @property
    def of_likeliest(self) -> bool:
        """Whether some tokens may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalises(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def with_seed(params: SamplingParams, plus: int) -> SamplingParams:
    """Return the parameters with their seed plus a number, if they have one."""
    return params if params.seed is None or not plus else replace(params, seed=(params.seed + plus) % 2**63)


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


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], streams: Sequence[RandomStream]) -> list[int | None]:
    """A token of each row of logits [B, vocab_size], fp32; None for a row that no token can be chosen from, because it
    holds a NaN or an infinity, or nothing but minus infinity. Other rows are chosen as they are without it. Single
    tokens of minus infinity are never drawn.

    A draw takes one number of the sequence's stream. One transfer from the device, of token ids.
    """
    return [token for (token,) in sample_drafted(logits[:, None], [()] * len(params), params, streams)]


def sample_drafted(
    logits: torch.Tensor,
    drafts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    streams: Sequence[RandomStream],
) -> list[list[int | None]]:
    """The tokens that `sample` chooses for each of B sequences one after another, as far as logits go.

    logits fp32 [B, n, vocab_size]: after the sequence, and after its first 1 to n - 1 drafts; drafts: n - 1 of each. A
    sequence's tokens end with the first that is not its draft, behind which no logits are, or with None. So a draft is
    taken with the probability that the model gives it, and tokens are those without drafts, sampled ones too.
    """
    # The maximum of a row that holds a NaN is NaN.
    largest, best = logits.max(-1)
    for rows in _groups(params, _AT_ONCE if logits.is_cuda else 1):
        index = packing.to_device(rows, torch.int64, logits.device)
        numbers = [streams[row].coming(logits.shape[1]) for row in rows]
        best[index] = _draw(logits[index], largest[index], [params[row] for row in rows], numbers)
    found = []
    for row, tokens in enumerate(torch.where(largest.isfinite(), best, -1).tolist()):
        right = next((i for i, guess in enumerate(drafts[row]) if tokens[i] != guess), len(tokens) - 1)
        found.append([None if token < 0 else token for token in tokens[: right + 1]])
        if params[row].temperature > 0:
            streams[row].drop(right + 1)
    return found


def _groups(params: Sequence[SamplingParams], most: int) -> Iterator[list[int]]:
    """The rows that are not greedy, up to `most` at a time, of which all or none choose among the likeliest."""
    for likeliest in (False, True):
        rows = [row for row, one in enumerate(params) if one.temperature > 0 and one.of_likeliest == likeliest]
        yield from (rows[i : i + most] for i in range(0, len(rows), most))


def _draw(
    logits: torch.Tensor, largest: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[Sequence[float]]
) -> torch.Tensor:
    """int64 [B, n]: tokens of logits [B, n, vocab_size], of which the largest are [B, n], by n numbers of each row."""
    vocab_size = logits.shape[-1]
    top_k = [min(one.top_k or vocab_size, vocab_size) for one in params]
    limits = [(one.temperature, k, one.top_p, one.min_p) for one, k in zip(params, top_k)]
    each = [(drawn, *own) for own, row in zip(limits, numbers) for drawn in row]
    drawn, temperature, k, p, min_p = packing.to_device(list(zip(*each)), torch.float64, logits.device)[..., None]
    rows = logits.flatten(0, 1), largest.reshape(-1, 1), temperature, drawn
    if params[0].of_likeliest:
        min_p = min_p if any(one.min_p for one in params) else None
        tokens = draw_of_likeliest(*rows, k.long(), p, max(top_k), min_p)
    else:
        tokens = draw(*rows)
    return tokens.view(largest.shape)
