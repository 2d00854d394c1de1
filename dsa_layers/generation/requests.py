"""Requests, their sequences and results, checks of prompts and stop strings, and throughput."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from dsa.runtime.checks import integer, shown
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.tokenizer import StreamDecoder, Tokenizer

FinishReason = Literal["eos", "stop", "length", "error"]


class Logprob(NamedTuple):
    """The log-probability of a token.

    logprob  natural logarithm of the token's probability, from the model's logits before penalties and temperature
    rank     the token's rank by probability, from 1 for the likeliest; the order of equally likely tokens is arbitrary
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one sequence.

    sequence       the number of the sequence. In a `Generator`, numbers start at 0 in each call, and each prompt has
                   SamplingParams.n consecutive numbers. `Engine.add_request` returns a request's first number
    token          the token id; None if finish_reason is "error"
    text           the text that this token completes; it may be empty. The concatenated texts of all events are the
                   text of the sequence
    finish_reason  why the sequence ended, in its last event; None in other events
    error          the message, if finish_reason is "error"
    logprobs       a dictionary from token id to `Logprob`, if SamplingParams.logprobs is set and finish_reason is not
                   "error". It contains this token and then the likeliest tokens in order
    """

    sequence: int
    token: int | None
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: dict[int, Logprob] | None = None


@dataclass
class Completion:
    """The result of a sequence.

    prompt_tokens  the number of tokens of the prompt
    tokens         the new tokens, including the end-of-sequence token if it ended the sequence
    text           the text of the new tokens, up to the first stop string
    finish_reason  "eos" (an end-of-sequence token), "stop" (a stop string), "length" (max_tokens or the model's
                   context), or "error" (the largest logit was NaN or infinite); None before the sequence ends
    error          the message, if finish_reason is "error"
    prompt         the index of the prompt in the call
    logprobs       `TokenEvent.logprobs` of each token, if SamplingParams.logprobs is set
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
    """Tokens and seconds of passes over prompts (prefill), and of passes that extend sequences (decode).

    decode_tokens  the number of new tokens, without the first token of each sequence, which a prefill pass computes
    drafted        the number of draft tokens in decoding passes
    taken          the number of accepted drafts: tokens that sequences gained beyond one per sequence and decoding pass
    reused_tokens  the number of prompt tokens that no pass computed, because the prefix cache contained their pages
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


def encode_prompts(
    prompts: str | Sequence[str | Sequence[int]], tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return the token ids of each prompt. A prompt is a text, which `tokenizer` encodes, or a list, an array or a
    tensor of ids. A text that is not in a list is one prompt.

    Raise TypeError or ValueError, with the name of the prompt, if a prompt has another type or is empty, if an id is
    outside [0, vocab_size), if there is no tokenizer for a text, or if a text has lone surrogates.
    """
    listed = [prompts] if isinstance(prompts, str) else _listed(prompts)
    if listed is None:
        raise TypeError(f"prompts: must be a text, or a list of texts or of lists of token ids, got {shown(prompts)}")
    return [encode_prompt(f"prompts[{i}]", prompt, tokenizer, vocab_size) for i, prompt in enumerate(listed)]


def encode_prompt(name: str, prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the token ids of one prompt, called `name` in errors. `encode_prompts` documents the rest."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{name}: must be token ids for a generator without a tokenizer, got a string")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            surrogate = f"character {error.start} is the surrogate U+{ord(prompt[error.start]):04X}"
            raise ValueError(
                f"{name}: is not Unicode text: {surrogate}, as bytes that are not UTF-8 leave it"
            ) from None
        ids = tokenizer.encode(prompt) if prompt else []
    else:
        listed = _listed(prompt)
        if listed is None:
            raise TypeError(f"{name}: must be a text or a list of token ids, got {shown(prompt)}")
        ids = [t if type(t) is int else integer(f"{name}[{j}]", t) for j, t in enumerate(listed)]
    if outside := [t for t in ids if not 0 <= t < vocab_size]:
        raise ValueError(f"{name}: token {shown(outside[0])} is outside the model's vocabulary of {vocab_size}")
    if not ids:
        raise ValueError(f"{name}: is empty; a prompt needs at least one token")
    return ids


def _listed(value: Any) -> list[Any] | None:
    """Return the items of a sequence, an array or a tensor; None for other types, texts and bytes."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else None


def check_stop_strings(stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise ValueError if there are stop strings without a tokenizer, or if a stop string is a special token, because
    generated text omits special tokens."""
    if stop and tokenizer is None:
        raise ValueError("params: stop strings need a tokenizer")
    for text in stop:
        if text in tokenizer.special_tokens:
            raise ValueError(f"stop: must not be a special token, which no text shows, got {shown(text)}")


class StopStrings:
    """Convert tokens to text, up to the first stop string. A stop string may begin in the last characters, so they are
    held back until more text or the last token arrives.

    decoder  the decoder of a tokenizer; None: there is no tokenizer, and the text is empty
    stop     the stop strings
    """

    def __init__(self, decoder: StreamDecoder | None, stop: Sequence[str]) -> None:
        self._decoder, self._stop, self._held = decoder, tuple(stop), ""

    def push(self, token: int | None, *, last: bool) -> tuple[str, bool]:
        """Add a token. Return (the text that can be shown now, whether a stop string follows that text).

        token  the next token, or None to add none
        last   whether no further token follows; if so, no text is held back
        """
        if self._decoder is None:
            return "", False
        if token is not None:
            self._held += self._decoder.push(token)
        if last:
            self._held += self._decoder.flush()
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        undecided = 0 if last else max(map(len, self._stop), default=1) - 1
        keep = min(found) if found else max(len(self._held) - undecided, 0)
        text, self._held = self._held[:keep], self._held[keep:]
        return text, bool(found)


@dataclass(eq=False)
class Request:
    """A request: the `sequences` that one call has added to an engine.

    number  the number of the request. In an `Engine` it is also the number of the first sequence, and the other
            sequences have the numbers that follow
    events  the events that no stream has returned yet. If a pass failed and ended the request, the last item is its
            exception
    """

    number: int
    sequences: "list[RunningSequence]"
    events: deque[TokenEvent | Exception] = field(default_factory=deque)

    @property
    def ended(self) -> bool:
        return all(s.ended for s in reversed(self.sequences))  # the last sequence usually ends last

    @property
    def needs_pass(self) -> bool:
        """Whether a pass must run before the request's stream can return the next event."""
        return not (self.events or self.ended)

    def end(self) -> None:
        for s in self.sequences:
            s.ended = True


@dataclass(eq=False)
class RunningSequence:
    """A sequence of the request `request`.

    index       the number of the sequence: `TokenEvent.sequence`
    name        the name of the prompt in errors
    prompt      the index of the prompt in the request
    tokens      the tokens of the prompt, followed by the generated tokens
    params      the sampling parameters
    limit       the largest number of tokens, including the prompt
    text        the converter from generated tokens to text
    eos         the tokens that end the sequence
    seed        the seed of the sequence's random numbers
    drafts      guesses of the next tokens
    pages       the cache pages of the sequence. The first `shared` pages may be shared with other sequences
    state_slot  the state slot of the sequence in the cache
    cached      the number of tokens that are in the cache
    stops       values of `cached` at which a prefill pass must end, so that the state can be copied
    ended       whether the sequence has no further events. Its memory is released before the next pass at the latest
    """

    name: str
    prompt: int
    tokens: list[int]
    params: SamplingParams
    limit: int
    text: StopStrings
    eos: Set[int]
    seed: int = 0
    index: int = 0
    request: Request | None = None
    drafts: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    state_slot: int = -1
    cached: int = 0
    stops: set[int] = field(default_factory=set)
    ended: bool = False

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_len

    def take(self, tokens: Sequence[int | None], logprobs: Sequence[dict[int, Logprob]]) -> list[TokenEvent]:
        """Add the next tokens to the sequence, up to its end, and return their events.

        tokens    the next tokens. The last item is None if no token could be chosen
        logprobs  the log-probabilities of each token except None, or an empty list
        """
        events = []
        for token, own in zip_longest(tokens, logprobs):
            events.append(self._failed() if token is None else self._extended(token, own))
            if events[-1].finish_reason:
                break
        return events

    def _extended(self, token: int, logprobs: dict[int, Logprob] | None) -> TokenEvent:
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.eos:
            reason = "eos"
        elif len(self.tokens) >= self.limit:
            reason = "length"
        text, stopped = self.text.push(token, last=reason is not None)
        return TokenEvent(self.index, token, text, "stop" if stopped else reason, logprobs=logprobs)

    def _failed(self) -> TokenEvent:
        error = (
            f"{self.name}: its logits after {len(self.tokens)} tokens hold NaN or infinity: "
            "the weights do, or an activation overflowed"
        )
        return TokenEvent(self.index, None, self.text.push(None, last=True)[0], "error", error)
