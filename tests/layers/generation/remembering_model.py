"""A model whose next token depends on all cached tokens, and is probably wrong if a pass reads a wrong page."""

from types import SimpleNamespace

import torch

from dsa_layers.cache.kv_cache import Cache
from dsa_layers.generation.engine import Engine

VOCABULARY = 7
RING = 4  # number of latest tokens whose states the cache keeps, so that drafts can be rejected


def next_token(tokens, stateful=False):
    return (mixed(tokens) + (sum_of(tokens) if stateful else 0)) % VOCABULARY


def next_draft(tokens, stateful):
    """Return the token that RememberingDrafter drafts after these tokens."""
    entries = [entry(next_token(tokens[: i + 1], stateful), token) for i, token in enumerate(tokens[1:])]
    return next_token(entries, stateful)


def continued(prompt, count, stateful=False):
    """Return the first `count` tokens that RememberingModel generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, stateful))
    return tokens[len(prompt) :]


def mixed(values):
    """Return a number that depends on every value and its position."""
    found = 0
    for value in values:
        found = (found * 31 + value + 1) % 10007
    return found


def sum_of(values):
    return sum(value * value + 1 for value in values)


def entry(state, token):
    """Return the value that the drafter stores for a position with this model state and this next token."""
    return state * 11 + token


class ValuesCache(Cache):
    """A cache with a value per token, and with states if `stateful`.

    values  [pages, page_size]
    states  [state slots, RING]: `sum_of` the values up to each of a sequence's latest RING tokens; None without states
    """

    def __init__(self, pages, page_size, state_slots, stateful, device):
        super().__init__(pages, page_size, state_slots)
        self.values = torch.full((pages, page_size), -1, device=device)
        self.states = torch.full((state_slots, RING), -1, device=device) if stateful else None

    def tensors(self):
        return [self.values, *self.state_tensors()]

    def state_tensors(self):
        return [] if self.states is None else [self.states]

    def extended(self, values, batch):
        """Store the value of each new token of a batch. Return the next token after each of them."""
        values, found = values.tolist(), []
        for b, total in enumerate(batch.key_lens_tensor.tolist()):
            pages, slot = batch.block_table[b].tolist(), int(batch.state_slots_tensor[b])
            for position in range(total - batch.query_lens[b], total):
                value = values[len(found)]
                self.values[pages[position // self.page_size], position % self.page_size] = value
                own = self.values[pages[: position // self.page_size + 1]].flatten().tolist()[: position + 1]
                now = mixed(own)
                if self.states is not None:
                    before = int(self.states[slot, (position - 1) % RING]) if position else 0
                    self.states[slot, position % RING] = before + sum_of([value])
                    now += before + sum_of([value])
                found.append(now % VOCABULARY)
        return torch.tensor(found)


class RememberingModel(torch.nn.Module):
    """A model that generates `next_token`.

    stateful      whether the cache has states
    with_drafter  whether the model has a RememberingDrafter
    context       the maximum number of tokens of a sequence
    passes        the query lengths of each pass
    fail_at       the number of the pass, counted from 1, that raises ZeroDivisionError; None: no pass fails
    """

    page_size = 4
    captures_decode = False

    def __init__(self, *, stateful=False, with_drafter=False, context=10**6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=context, eos_token_ids=())
        self.stateful = stateful
        self.passes, self.fail_at = [], None
        self.drafter = RememberingDrafter(stateful=stateful) if with_drafter else None

    def make_cache(self, num_pages, page_size=4, device="cpu", *, state_slots=64):
        return ValuesCache(num_pages, page_size, state_slots, self.stateful, device)

    def states(self, tokens, batch, cache):
        self.passes.append(list(batch.query_lens))
        if len(self.passes) == self.fail_at:
            raise ZeroDivisionError
        return cache.extended(tokens, batch)

    def logits(self, states):
        return torch.nn.functional.one_hot(states, VOCABULARY).float()

    def forward(self, tokens, batch, cache=None, *, all_tokens=False):
        return self.logits(self.states(tokens, batch, cache)[batch.last_tokens])


class RememberingDrafter(RememberingModel):
    """The drafter of a RememberingModel. Its first draft is `next_draft`."""

    def forward(self, tokens, states, batch, cache):
        return cache.extended(entry(states, tokens), batch)


def engine_of(kind=Engine, *, stateful=False, **options):
    """Return an Engine or Generator (`kind`) that runs a RememberingModel with a small cache."""
    options = {"page_size": 4, "cache_tokens": 64, "max_sequences": 3, "prefill_chunk": 5} | options
    return kind(RememberingModel(stateful=stateful, with_drafter=options.get("draft_tokens", 0) > 0), **options)


def is_free(engine):
    """Release the memory of ended sequences. Return whether no sequence runs, waits or holds pages or a state slot."""
    engine._release_ended()
    slots = engine.cache.state_slots.free == engine.capacity.sequences
    pages = engine.cache.allocator.free + len(engine.memory._prefixes.unused)
    return pages == engine.capacity.pages and slots and not engine._running and not engine.unfinished
