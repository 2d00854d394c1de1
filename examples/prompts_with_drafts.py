"""A batch of prompts that begin alike, with drafts of the multi-token-prediction layer and the prefix cache.

usage: python examples/prompts_with_drafts.py
"""

from dsa_layers import SHIPPED_MODEL, Generator, SamplingParams, Tokenizer, load_model

# More than a page of 64 tokens, which the prompts share.
BEGINNING = '''"""Collections that keep their items in order."""

import bisect
from collections.abc import Iterable, Iterator


class SortedList:
    """A list whose items are always sorted."""

    def __init__(self, items: Iterable = ()) -> None:
        self._items = sorted(items)

'''
METHODS = ("__len__(self", "__iter__(self", "add(self, item", "pop(self")
PROMPTS = [f"{BEGINNING}    def {method}" for method in METHODS]


def main() -> None:
    model = load_model(SHIPPED_MODEL, drafter=True, dequantize=True, progress=False)
    generator = Generator(model, Tokenizer(SHIPPED_MODEL), draft_tokens=1, prefix_cache=True, cache_tokens=4096)
    params = SamplingParams(max_tokens=40, stop=["\n\n"])
    for _ in range(2):
        for prompt, completion in zip(PROMPTS, generator.generate(PROMPTS, params), strict=True):
            print(prompt.removeprefix(BEGINNING) + completion.text)
        done = generator.throughput
        print(f"\nprompt tokens: {done.prefill_tokens} computed, {done.reused_tokens} from the prefix cache")
        print(f"drafts: {done.taken} of {done.drafted} taken\n")


if __name__ == "__main__":
    main()
