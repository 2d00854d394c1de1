"""A model that stands in for others where it matters what is computed when: its next token follows from all tokens of
the sequence as they are in its cache, so that a page or a state that is another's gives another token."""

from types import SimpleNamespace

import torch

from dsa_layers.cache.kv_cache import PageAllocator

VOCABULARY = 7
RING = 4  # states of the last tokens, of which drafts may be taken back


def next_token(tokens, stateful):
    """What RememberingModel says after these."""
    found = mixed(tokens)
    if stateful:
        found += sum_of(tokens)
    return found % VOCABULARY


def next_draft(tokens, stateful):
    """What its drafter says comes behind these."""
    entries = [entry(next_token(tokens[: i + 1], stateful), token) for i, token in enumerate(tokens[1:])]
    return (mixed(entries) + (sum_of(entries) if stateful else 0)) % VOCABULARY


def mixed(values):
    """Depends on every value and its place."""
    found = 0
    for value in values:
        found = (found * 31 + value + 1) % 10007
    return found


def sum_of(values):
    return sum(value * value + 1 for value in values)


def entry(state, token):
    """What the drafter keeps of a position with that state, and that token behind it."""
    return state * 11 + token


class ValuesCache:
    """values [pages, page_size]; states [state slots, RING]: sums up to a token, if they are kept by sequence."""

    def __init__(self, pages, page_size, state_slots, stateful):
        self.page_size = page_size
        self.allocator, self.state_slots = PageAllocator(pages), PageAllocator(state_slots)
        self.values = torch.full((pages, page_size), -1)
        self.states = torch.full((state_slots, RING), -1) if stateful else None

    def layer(self, i):
        return self.values

    def tensors(self):
        return [self.values, *self.state_tensors()]

    def state_tensors(self):
        return [] if self.states is None else [self.states]

    @property
    def nbytes(self):
        return sum(tensor.nbytes for tensor in self.tensors())

    def extended(self, values, batch):
        """Writes a value for each row, and gives what each sequence has up to that row."""
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
    """stateful: its cache keeps something by sequence. `passes` notes the query lengths of each pass, and `fail_at` is
    the number of the one that fails."""

    page_size = 4
    captures_decode = False

    def __init__(self, *, stateful=False, with_drafter=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=10**6, eos_token_ids=())
        self.stateful = stateful
        self.passes, self.fail_at = [], None
        self.drafter = RememberingDrafter(stateful) if with_drafter else None

    def make_cache(self, num_pages, page_size=4, device="cpu", *, state_slots=64):
        return ValuesCache(num_pages, page_size, state_slots, self.stateful)

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
    """Its first draft is `next_draft`. States are those of its own cache."""

    def __init__(self, stateful):
        super().__init__(stateful=stateful)

    def forward(self, tokens, states, batch, cache):
        return cache.extended(entry(states, tokens), batch)
