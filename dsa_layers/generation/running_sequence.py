"""A sequence while it is generated."""

from collections.abc import Sequence, Set

from dsa_layers.cache.prefix_tree import CachedPage
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.results import FinishReason, Logprob, TokenEvent
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.stop_strings import StopStrings
from dsa_layers.generation.token_counts import TokenCounts


class RunningSequence:
    """A sequence that is being generated: its tokens, its pages, how many of its tokens are in the cache, and drafts of
    those to come.

    name: of its prompt, in errors; request: the number of its request; prompt_index: which prompt of a call it
    continues. limit: the tokens that it has at most; eos: those that end it.
    counts: of its tokens, once penalties have asked for them. shared: of its pages the first ones, which other
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
        *,
        name: str,
        request: int,
        prompt_index: int = 0,
    ) -> None:
        self.index = index
        self.name = name
        self.request = request
        self.prompt_index = prompt_index
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
        self.counts: TokenCounts | None = None

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_len

    def take(self, tokens: Sequence[int | None], logprobs: Sequence[dict[int, Logprob] | None]) -> list[TokenEvent]:
        """The events of its next tokens, up to its end; None is one that could not be chosen."""
        events = []
        for token, own in zip(tokens, logprobs):
            events.append(self._fail() if token is None else self._extend(token, own))
            if events[-1].finish_reason:
                break
        return events

    def _extend(self, token: int, logprobs: dict[int, Logprob] | None) -> TokenEvent:
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in self.eos:
            reason = "eos"
        elif len(self.tokens) >= self.limit:
            reason = "length"
        text, stopped = self.text.push(token, last=reason is not None)
        return TokenEvent(self.index, token, text, "stop" if stopped else reason, logprobs=logprobs)

    def _fail(self) -> TokenEvent:
        error = (
            f"{self.name}: its logits after {len(self.tokens)} tokens hold NaN or infinity: "
            "the weights do, or an activation overflowed"
        )
        return TokenEvent(self.index, None, self.text.finish(), "error", error)
