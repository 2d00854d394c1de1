"""Which CUDA graphs of decoding passes to capture before requests come."""

from collections.abc import Sequence

from dsa_layers.arguments import integer, shown
from dsa_layers.generation.captured_step import power_of_two
from dsa_layers.generation.engine_cache import EngineCache
from dsa_layers.generation.engine_options import EngineOptions


def graph_sizes(
    cache: EngineCache, options: EngineOptions, batch_sizes: Sequence[int] | None, max_tokens: int | None
) -> list[tuple[int, int]]:
    """Return (sequences, pages) of the graphs of `Engine.warm_up`, the largest first: their memory then holds all
    others."""
    most = options["max_sequences"]
    if batch_sizes is None:
        batch_sizes = [1 << i for i in range((min(most, cache.capacity) - 1).bit_length() + 1)]
    elif not isinstance(batch_sizes, Sequence) or isinstance(batch_sizes, str | bytes):
        raise TypeError(f"batch_sizes: must be a list of integers or None, got {shown(batch_sizes)}")
    else:
        batch_sizes = [integer(f"batch_sizes[{i}]", n, at_least=1, at_most=most) for i, n in enumerate(batch_sizes)]
    if max_tokens is None:
        max_tokens = min(cache.context, cache.capacity * cache.page_size - options["draft_tokens"])
    else:
        max_tokens = integer("max_tokens", max_tokens, at_least=1, at_most=cache.context)
    widths = range((cache.pages(max_tokens) - 1).bit_length() + 1)
    sizes = {(power_of_two(count), 1 << width) for count in batch_sizes for width in widths}
    if len(sizes) > options["max_graphs"]:
        raise ValueError(
            f"batch_sizes: with sequences of up to {max_tokens} tokens (max_tokens) they need {len(sizes)} graphs; "
            f"accepted: at most {options['max_graphs']} (max_graphs)"
        )
    return sorted(sizes, reverse=True)
