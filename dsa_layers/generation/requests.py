"""The sequences of requests: checked, and the same on all ranks."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence, Set

from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.families.model import Model
from dsa_layers.generation.draws import RandomStream
from dsa_layers.generation.engine_cache import EngineCache
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sampling import SamplingParams, with_seed
from dsa_layers.generation.stop_strings import StopStrings, check_stop_strings
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.parallel.process_group import agreed
from dsa_layers.parallel.ranks import ALONE, Ranks
from dsa_layers.parallel.together import together


class Requests:
    """eos: the tokens that end a sequence."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, cache: EngineCache, eos: Set[int]) -> None:
        self._model, self._tokenizer, self._cache, self.eos = model, tokenizer, cache, eos
        self._ranks: Ranks = getattr(model, "ranks", ALONE)

    @contextlib.contextmanager
    def agreed(self) -> Iterator[list[RunningSequence]]:
        """Give a list for the sequences that are made within. If one rank raises or makes others, all raise
        (`together`). Sequences without a seed get the first rank's, so that all ranks choose the same tokens."""
        sequences: list[RunningSequence] = []
        with together(self._ranks) as facts:
            yield sequences
            if self._ranks.size > 1:
                facts["prompts"] = _digest([s.tokens for s in sequences])
                facts["params"] = _digest([s.params for s in sequences])
        if self._ranks.size > 1:
            seeds = agreed(self._ranks, lambda: [random.SystemRandom().getrandbits(63) for _ in sequences])
            for s, seed in zip(sequences, seeds):
                if s.params.seed is None:
                    s.random = RandomStream(seed)

    def sequences(
        self, name: str, tokens: Sequence[int], params: SamplingParams, first: int, prompt_index: int = 0
    ) -> list[RunningSequence]:
        """Return the `params.n` sequences of a prompt, with numbers from `first` on.

        name  of the prompt, in errors

        Raises ValueError or OutOfPages as `Engine.add_request` does.
        """
        vocab_size = self._model.config.vocab_size
        if len(tokens) >= self._cache.context:
            raise ValueError(f"{name}: has {len(tokens)} tokens; the model's context holds {self._cache.context}")
        if (params.logprobs or 0) > vocab_size:
            raise ValueError(f"logprobs: must be at most the vocabulary of {vocab_size}, got {params.logprobs}")
        if params.stop and self._tokenizer is None:
            raise ValueError("params: stop strings need a tokenizer")
        if params.stop:
            check_stop_strings(params.stop, self._tokenizer)
        limit = min(len(tokens) + params.max_tokens, self._cache.context)
        if not self._cache.fits(limit):
            raise OutOfPages(f"{name}: {self._cache.why_too_small(len(tokens), limit - len(tokens))}")
        made = []
        for k in range(params.n):
            text = StopStrings(self._tokenizer.stream() if self._tokenizer else None, params.stop)
            own = with_seed(params, k), limit, text, self.eos
            made.append(RunningSequence(first + k, tokens, *own, name=name, request=first, prompt_index=prompt_index))
        return made


def _digest(values: list) -> str:
    return f"ones of digest {hashlib.sha256(repr(values).encode()).hexdigest()[:12]}"
