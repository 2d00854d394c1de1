"""`dsa plan`: what each of several GPUs would hold of a model, and what context is left."""

import argparse
from typing import TYPE_CHECKING

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.arguments import integer
from dsa_layers.command import on_gpus
from dsa_layers.command.model_options import CONFIG_HELP, add_draft_option, add_precision_options

if TYPE_CHECKING:
    from dsa_layers.io.gpu_plan import GpuPlan

_TEXT = """\
Reads config.json alone, and with --draft what tensors the index names. Weights are shared by the GPUs: attention by
heads, MLPs by their inner channels, experts by their number, embeddings and the head by the vocabulary. Every GPU has
the weights of shared experts whole, and where its share of the heads is below 64 those of attention with all heads:
long passes are split by tokens there. Every GPU has all of the cache. Context is what fits beside the weights into
90% of a GPU's memory, for all sequences together, where --draft K takes K tokens more of each."""
GB = 10**9


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="what each of several GPUs would hold of a model", description=_TEXT)
    parser.set_defaults(run=run)
    parser.add_argument(
        "checkpoint",
        type=options.path,
        nargs="?",
        default=SHIPPED_MODEL,
        help=CONFIG_HELP,
    )
    parser.add_argument(
        "--gpus", type=options.positive, metavar="N", help=f"so many (default: every number up to {on_gpus.MOST_GPUS})"
    )
    parser.add_argument(
        "--memory",
        type=options.size,
        metavar="GB",
        help="of a GPU, in 10^9 bytes, as 139.8 (default: that of the GPU here, else 80)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=options.positive,
        metavar="N",
        help="of the cache (default: as many as there is room for)",
    )
    add_draft_option(parser, "with the checkpoint's multi-token-prediction layer, as dsa generate has it")
    add_precision_options(parser, dequantized="off")


def run(args: argparse.Namespace) -> int:
    import torch

    from dsa_layers.cache.cache import most_tokens
    from dsa_layers.families.config import read_config
    from dsa_layers.io.directory import StoredNames
    from dsa_layers.io.gpu_plan import plans, precision_of
    from dsa_layers.io.hub import checkpoint_directory

    directory = checkpoint_directory(args.checkpoint, weights=False)
    config = read_config(directory)
    chosen = {"dequantize": bool(args.dequantize), "kv_cache": args.kv_cache, "widen_experts": args.widen_experts}
    precision = precision_of(config, dtype=args.dtype and getattr(torch, args.dtype), **chosen)
    if args.memory is not None:
        memory = int(args.memory * GB)
    else:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * GB
    with on_gpus.errors_of_options():
        drafted = StoredNames.of(directory) if args.draft else None
        if args.gpus:
            found = {args.gpus: on_gpus.plan_of(config, precision, args.gpus, drafted)}
        else:
            found = plans(config, precision, on_gpus.MOST_GPUS, drafted)
    drafters = " with the drafter's" if args.draft else ""
    first = next(iter(found.values()))  # one GPU always holds a whole model
    if args.cache_tokens is not None:
        integer("--cache-tokens", args.cache_tokens, at_most=most_tokens(first.page_size))
    size = f"{first.whole / GB:.1f} GB of weights{drafters}"
    print(f"{args.checkpoint}: {size}, {_cache(first)}; GPUs of {round(memory / GB, 1):g} GB")
    print(f"{'GPUs':>4}  {'weights a GPU':>14}  " + ("in use" if args.cache_tokens else "tokens cached at most"))
    fits = False
    for gpus, one in found.items():
        if isinstance(one, ValueError):
            if gpus.bit_count() == 1:  # nobody expects others
                print(f"{gpus:>4}  {str(one).removeprefix(f'gpus: {gpus} ')}")
        elif _line(one, memory, args.cache_tokens, args.draft):
            fits = True
    return 0 if fits else 1


def _cache(one: "GpuPlan") -> str:
    return f"a cache of {one.page / one.page_size / 1000:.1f} KB a token on every GPU"


def _line(one: "GpuPlan", memory: int, cache_tokens: int | None, drafts: int) -> bool:
    """Prints it. Whether it fits."""
    tokens = one.tokens(memory)
    if cache_tokens is None:
        fits, what = tokens > 0, f"{tokens - drafts}" if tokens else "does not fit"
    else:
        fits = tokens >= cache_tokens
        what = f"{one.bytes(cache_tokens) / GB:.1f} GB" + ("" if fits else ", does not fit")
    print(f"{one.gpus:>4}  {one.weights / GB:>11.1f} GB  {what}")
    return fits
