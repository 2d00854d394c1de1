"""A sequence while it is generated."""

from collections.abc import Sequence, Set

from dsa_layers.cache.prefix_tree import CachedPage
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.results import FinishReason, TokenEvent
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.stop_strings import StopStrings


class RunningSequence:
    """A sequence that is being generated: its tokens, its pages, how many of its tokens are in the cache, and drafts of
    those to come.

    limit: the tokens that it has at most; eos: those that end it. shared: of its pages the first ones, which other
    sequences may have, too. stops: lengths of its prompt at which a pass has to end.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        limit: int,
        text: StopStrings,
        eos: Set[int],
    ) -> None:
        self.index = index
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.limit = limit
        self.text = text
        self.eos = eos
        self.random = RandomStream(params.seed)
        self.pages: list[int] = []
        self.shared: list[CachedPage] = []
        self.state_slot = -1
        self.cached = 0
        self.stops: set[int] = set()
        self.drafts: list[int] = []

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_len

    def take(self, tokens: Sequence[int | None]) -> list[TokenEvent]:
        """The events of its next tokens, up to its end; None is one that could not be chosen."""
        events = []
        for token in tokens:
            events.append(self._fail() if token is None else self._extend(token))
            if events[-1].finish_reason:
                break
        return events

    def _extend(self, token: int) -> TokenEvent:
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.eos:
            reason = "eos"
        elif len(self.tokens) >= self.limit:
            reason = "length"
        text, stopped = self.text.push(token, last=reason is not None)
        return TokenEvent(self.index, token, text, "stop" if stopped else reason)

    def _fail(self) -> TokenEvent:
        error = (
            f"prompts[{self.index}]: its logits after {len(self.tokens)} tokens hold NaN or infinity: the weights do, "
            "or an activation overflowed"
        )
        return TokenEvent(self.index, None, self.text.finish(), "error", error)
