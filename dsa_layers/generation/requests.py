"""Requests and their results: prompts, sequences while they are generated, events of tokens, and throughput."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from dsa_layers.arguments import integer, shown
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.tokenizer import StreamDecoder, Tokenizer

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


def encode_prompts(
    prompts: str | Sequence[str | Sequence[int]], tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return the token ids of each prompt: a text, which `tokenizer` encodes, or a list, an array or a tensor of ids. A
    text that is not in a list is one prompt.

    Raises TypeError or ValueError, which name the prompt and the token, for anything else, for empty prompts, ids
    outside [0, vocab_size), and texts that are not Unicode (lone surrogates).
    """
    listed = [prompts] if isinstance(prompts, str) else _listed(prompts)
    if listed is None:
        raise TypeError(f"prompts: must be a text, or a list of texts or of lists of token ids, got {shown(prompts)}")
    return [encode_prompt(f"prompts[{i}]", prompt, tokenizer, vocab_size) for i, prompt in enumerate(listed)]


def encode_prompt(name: str, prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the token ids of one prompt. Raises as `encode_prompts` does, with this name."""
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
    """Return the items of a sequence, an array or a tensor; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else None


def check_stop_strings(stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    """Raise ValueError for stop strings without a tokenizer, and for the name of a special token: no text shows it, so
    it would end nothing."""
    if stop and tokenizer is None:
        raise ValueError("params: stop strings need a tokenizer")
    for text in stop:
        if text in tokenizer.special_tokens:
            raise ValueError(f"stop: must not be a special token, which no text shows, got {shown(text)}")


class StopStrings:
    """Convert tokens to text, up to the first stop string. The last characters, in which a stop string may begin, are
    held back until later text decides it.

    decoder  None without a tokenizer: the text is then empty
    """

    def __init__(self, decoder: StreamDecoder | None, stop: Sequence[str]) -> None:
        self._decoder, self._stop, self._held = decoder, tuple(stop), ""

    def push(self, token: int | None, *, last: bool) -> tuple[str, bool]:
        """Return (the text that can be shown, whether there is a stop string after it). token: the next one, if there
        is one. last: no token follows, so that no text is held back."""
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
    """The sequences that one call has added to an engine.

    number  that of the first sequence; the others have the numbers that follow
    events  those that its stream has not returned yet; the last one may be the error of the pass that ended the request
    """

    number: int
    sequences: "list[RunningSequence]"
    events: deque[TokenEvent | Exception] = field(default_factory=deque)

    @property
    def ended(self) -> bool:
        return all(s.ended for s in reversed(self.sequences))  # the last ones end last

    def end(self) -> None:
        for s in self.sequences:
            s.ended = True


@dataclass(eq=False)
class RunningSequence:
    """A sequence of a request.

    index       its number: `TokenEvent.sequence`
    name        of its prompt, for errors
    prompt      the index of its prompt in the request
    tokens      of the prompt, then the generated ones
    limit       the most tokens that it can have
    eos         tokens that end it
    seed        of its random numbers
    drafts      guesses of the tokens that follow
    pages, state_slot   its places in the cache. `SequenceMemory` shares the first `shared` pages with other sequences
    cached      the number of its tokens that are in the cache
    stops       numbers of prompt tokens at which a pass has to end
    ended       whether it has no further events; its memory is then released before the next pass
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
        """Return the events of the next tokens, up to the end of the sequence. A token is None if none could be chosen.
        logprobs: of each token, or an empty list."""
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
