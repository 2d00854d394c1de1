"""The options that say how tokens are drawn, how many, and in how large a cache."""

import argparse
import re
from typing import TYPE_CHECKING

from dsa_layers import options

if TYPE_CHECKING:
    from dsa_layers.generation.sampling import SamplingParams


def add_sampling_options(parser: argparse.ArgumentParser, *, max_new_tokens: int, each: str) -> None:
    """max_new_tokens: its default. each: what has so many tokens and a seed of its own, in a word."""
    parser.add_argument(
        "--max-new-tokens",
        type=options.positive,
        default=max_new_tokens,
        metavar="N",
        help=f"of each {each}, or what the model's context leaves if that is fewer (default: %(default)s)",
    )
    source = "default: generation_config.json's, else"
    parser.add_argument(
        "--temperature", type=options.temperature, metavar="T", help=f"0 is greedy ({source} 0, or 1 if it samples)"
    )
    parser.add_argument(
        "--top-p",
        type=options.top_p,
        metavar="P",
        help=f"sample among the fewest tokens that have this probability together ({source} 1: all)",
    )
    parser.add_argument(
        "--top-k",
        type=options.not_negative,
        metavar="K",
        help=f"sample among so many tokens, the likeliest ({source} 0: all)",
    )
    parser.add_argument(
        "--seed",
        type=options.seed,
        help=f"of the first {each}'s random numbers; each further {each} has the next seed (default: others each time)",
    )
    parser.add_argument(
        "--stop",
        type=options.some_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this string, which is not shown, and not the name of a special token; may be repeated (default: "
        "none)",
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-tokens",
        type=options.positive,
        default=65536,
        metavar="N",
        help="the paged cache (default: %(default)s)",
    )


def sampling(args: argparse.Namespace) -> "SamplingParams":
    """Options first, then what the checkpoint's generation_config.json sets."""
    from dsa_layers.generation.sampling import SamplingParams
    from dsa_layers.generation.sampling_defaults import sampling_defaults

    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    chosen = {name: value for name, value in given.items() if value is not None}
    stop = [options.text("--stop", text) for text in args.stop]
    own = sampling_defaults(args.checkpoint) | chosen
    return SamplingParams(max_new_tokens=args.max_new_tokens, seed=args.seed, stop=stop, **own)


def by_options(problem: str) -> str:
    """A message of `Generator` with the names of the options: cache_tokens is --cache-tokens."""
    problem = re.sub(r"^cache_tokens\b|(?<=\()cache_tokens(?=\)$)", "--cache-tokens", problem)
    problem = re.sub(r"^draft_tokens\b", "--draft", problem)
    return re.sub(r"^batch_invariant\b", "--batch-invariant", problem)
