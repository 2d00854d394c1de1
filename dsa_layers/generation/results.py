"""The results of generation: events of tokens, finished sequences, and throughput."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["eos", "stop", "length", "error"]


class Logprob(NamedTuple):
    """logprob: natural logarithm of a token's probability by the model's logits, before penalties and temperature;
    rank: how many tokens are at least as likely, 1 for the likeliest."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence. text: the text that is complete by now, which may lag behind the tokens; the texts
    of all events make the sequence's text. finish_reason: set in the last event of a sequence. With "error" the
    sequence ends here, without another token, for the reason in `error`. logprobs: with SamplingParams.logprobs that of
    the token, and those of the likeliest tokens in order, by token id.

    sequence: counts the sequences of the call, n for each prompt one after another."""

    sequence: int
    token: int | None
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: dict[int, Logprob] | None = None


@dataclass
class Completion:
    """A finished sequence. tokens: the new ones, with the end-of-sequence token if that ended it. text: theirs, after
    the last event. finish_reason: "eos", "stop" (a stop string), "length" (max_tokens, or the model's context), or
    "error" where its logits were not finite, as `error` says; tokens and text are then those from before the error.
    prompt: the number of its prompt in the call. logprobs: with SamplingParams.logprobs those of each token."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt: int = field(default=0, compare=False)
    logprobs: list[dict[int, Logprob]] | None = None
    _pieces: list[str] = field(default_factory=list, repr=False, compare=False)

    def add(self, event: TokenEvent) -> None:
        """The sequence's next event."""
        if event.token is not None:
            self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(event.logprobs)
        self._pieces.append(event.text)
        if event.finish_reason is not None:
            self.text = "".join(self._pieces)
        self.finish_reason, self.error = event.finish_reason, event.error


@dataclass
class Throughput:
    """Tokens and seconds of the passes over prompts and of those that extend sequences. drafted, taken: tokens that
    were drafted, and those of them that became the sequences'. reused_tokens: of prompts, which other prompts had put
    into the cache before, so that no pass was needed."""

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
