"""A sequence while it is generated."""

from collections.abc import Sequence

from dsa_layers.generation.sampling import SamplingParams, random_stream
from dsa_layers.generation.stop_strings import StopStrings


class RunningSequence:
    """A sequence that is being generated: its tokens, its pages, how many of its tokens are in the cache, and drafts of
    those to come."""

    def __init__(self, index: int, prompt: Sequence[int], params: SamplingParams, limit: int, text: StopStrings):
        self.index = index
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.limit = limit
        self.text = text
        self.random = random_stream(params)
        self.pages: list[int] = []
        self.state_slot = -1
        self.cached = 0
        self.drafts: list[int] = []

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prompt_len
