"""A sequence while it is generated: its tokens, its text and its place in the cache."""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest

from dsa_layers.arguments import shown
from dsa_layers.generation.results import FinishReason, Logprob, TokenEvent
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.tokenizer import StreamDecoder, Tokenizer


def check_stop_strings(stop: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for the name of a special token: no text shows it, so it would end nothing."""
    for text in stop:
        if text in tokenizer.special_tokens:
            raise ValueError(f"stop: must not be a special token, which no text shows, got {shown(text)}")


class StopStrings:
    """Convert tokens to text, up to the first stop string. Text that may be the beginning of a stop string is held back
    until later text decides it.

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
        keep = min(found) if found else len(self._held) - (0 if last else self._undecided())
        text, self._held = self._held[:keep], self._held[keep:]
        return text, bool(found)

    def _undecided(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        lengths = ((n, text) for text in self._stop for n in range(1, min(len(text), len(self._held) + 1)))
        return max((n for n, text in lengths if self._held.endswith(text[:n])), default=0)


@dataclass(eq=False)
class Request:
    """The sequences that one call has added to an engine.

    number  that of the first sequence; the others have the numbers that follow
    events  those that its stream has not returned yet
    error   of the pass that ended the request; its stream raises it after these events
    """

    number: int
    sequences: "list[RunningSequence]"
    events: deque[TokenEvent] = field(default_factory=deque)
    error: Exception | None = None

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
