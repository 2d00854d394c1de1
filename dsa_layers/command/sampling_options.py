"""The options that say how tokens are drawn, how many, and in how large a cache."""

import argparse
import re
from typing import TYPE_CHECKING

from dsa_layers import options

_OPTIONS = {
    "batch_invariant": "--batch-invariant",
    "cache_tokens": "--cache-tokens",
    "draft_tokens": "--draft",
    "logprobs": "--logprobs",
    "stop": "--stop",
}

if TYPE_CHECKING:
    from dsa_layers.generation.sampling import SamplingParams
    from dsa_layers.io.tokenizer import Tokenizer


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int, each: str) -> None:
    """max_tokens: its default. each: what has so many tokens and a seed of its own, in a word."""
    parser.add_argument(
        "--max-tokens",
        type=options.positive,
        default=max_tokens,
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
        "--min-p", type=options.number, metavar="P", help=f"drop tokens below P times the likeliest ({source} 0)"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=options.number,
        metavar="R",
        help=f"divide positive logits of tokens that the sequence has by R, multiply others ({source} 1)",
    )
    for name, how in (("presence", "of tokens that were generated"), ("frequency", "as often as it was generated")):
        parser.add_argument(
            f"--{name}-penalty",
            type=options.number,
            default=0.0,
            metavar="X",
            help=f"subtract X from a logit, {how}, -2 to 2 (default: %(default)s)",
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


def add_cache_option(parser: argparse.ArgumentParser, default: str) -> None:
    """default: in words."""
    parser.add_argument(
        "--cache-tokens",
        type=options.positive,
        metavar="N",
        help=f"the paged cache (default: {default})",
    )


def sampling(args: argparse.Namespace, **more: int | None) -> "SamplingParams":
    """Options first, then what the checkpoint's generation_config.json sets. more: further parameters."""
    from dsa_layers.generation.sampling import SamplingParams, sampling_defaults

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: getattr(args, name) for name in names}
    chosen = {name: value for name, value in given.items() if value is not None}
    own = sampling_defaults(args.checkpoint) | chosen | more
    own |= {name: getattr(args, name) for name in ("max_tokens", "seed", "presence_penalty", "frequency_penalty")}
    try:
        return SamplingParams(stop=[options.text("--stop", text) for text in args.stop], **own)
    except ValueError as error:
        name, problem = str(error).split(":", 1)
        raise ValueError(f"--{name.replace('_', '-').removeprefix('--')}:{problem}") from None


def check_stop(params: "SamplingParams", tokenizer: "Tokenizer") -> None:
    """Raise the error of `Generator` about stop strings before weights are loaded."""
    from dsa_layers.generation.running_sequence import check_stop_strings

    try:
        check_stop_strings(params.stop, tokenizer)
    except ValueError as error:
        raise ValueError(by_options(str(error))) from None


def by_options(problem: str) -> str:
    """A message of `Generator` with the names of the options: cache_tokens is --cache-tokens."""
    names = "|".join(_OPTIONS)
    return re.sub(rf"^({names})\b|(?<=\()({names})(?=\)$)", lambda found: _OPTIONS[found[0]], problem)
