"""The results of generation: events of tokens, finished sequences, and throughput."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["eos", "stop", "length", "error"]


class Logprob(NamedTuple):
    """logprob: natural logarithm of a token's probability by the model's logits, before penalties and temperature.
    rank: the number of tokens that are at least as likely, 1 for the likeliest."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence.

    sequence       counts the sequences of the call, n per prompt one after another; in an engine, of all requests
    token          None if finish_reason is "error"
    text           text that is complete by now; the last tokens may have none yet. The texts of all events are the text
                   of the sequence
    finish_reason  in the last event of a sequence, else None
    error          the reason of finish_reason "error"
    logprobs       with SamplingParams.logprobs those of the token and of the likeliest tokens in order, by token id
    """

    sequence: int
    token: int | None
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: dict[int, Logprob] | None = None


@dataclass
class Completion:
    """A finished sequence.

    prompt_tokens  the number of tokens of its prompt
    tokens         the new ones, with the end-of-sequence token if that ended it
    text           of the new tokens
    finish_reason  "eos", "stop" (a stop string), "length" (max_tokens or the model's context), or "error" if its logits
                   were not finite; tokens and text are then those from before the error
    error          the reason of finish_reason "error"
    prompt         the index of its prompt in the call
    logprobs       with SamplingParams.logprobs those of each token
    """

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt: int = field(default=0, compare=False)
    logprobs: list[dict[int, Logprob]] | None = None

    def add(self, event: TokenEvent) -> None:
        """Add the sequence's next event."""
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(event.logprobs)
        self.text += event.text
        self.finish_reason, self.error = event.finish_reason, event.error


@dataclass
class Throughput:
    """Tokens and seconds of passes over prompts, and of passes that extend sequences.

    drafted        draft tokens
    taken          those of them that the model chose too
    reused_tokens  prompt tokens that earlier prompts had put into the cache, so that no pass computed them
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafted: int = 0
    taken: int = 0
    reused_tokens: int = 0

    def __str__(self) -> str:
        prefill = self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0
        decode = self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
        drafts = f"; drafts: {self.taken} of {self.drafted} taken" if self.drafted else ""
        reused = f" and {self.reused_tokens} reused" if self.reused_tokens else ""
        return (
            f"prefill: {self.prefill_tokens} tokens{reused}, {prefill:.1f} tokens/s; "
            f"decode: {self.decode_tokens} tokens, {decode:.1f} tokens/s{drafts}"
        )
