"""`dsa generate`: continue prompts with a checkpoint."""

import argparse
from pathlib import Path

from dsa_layers.command import options
from dsa_layers.command.streams import say

# Trained by examples/train_indexer.py; its README.md is the model card.
SHIPPED_MODEL = Path(__file__).parents[1] / "stdlib_model"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="continue prompts with a checkpoint")
    parser.set_defaults(run=run)
    parser.add_argument(
        "checkpoint",
        type=options.path,
        nargs="?",
        default=SHIPPED_MODEL,
        help="directory with config.json and safetensors; default: a small model of Python source that comes with dsa",
    )
    parser.add_argument("--prompt", action="append", required=True, help="repeat for a batch")
    parser.add_argument("--raw", action="store_true", help="no chat template, even if the tokenizer has one")
    parser.add_argument("--max-new-tokens", type=options.positive, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=options.integer, default=0)
    parser.add_argument("--seed", type=options.integer)
    parser.add_argument("--stop", action="append", default=[], help="end at this string; may be repeated")
    parser.add_argument("--device", help="cuda or cpu; default: cuda where there is a GPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    parser.add_argument("--dequantize", action="store_true", help="quantise nothing: FP8 weights become --dtype")
    parser.add_argument("--kv-cache", choices=("fp8", "model"), help="default: fp8 for FP8 checkpoints")
    parser.add_argument("--cache-tokens", type=options.positive, default=65536, help="size of the paged cache")
    parser.add_argument("--prefill-chunk", type=options.positive, default=2048, help="prompt tokens a pass")


def run(args: argparse.Namespace) -> int:
    import torch

    import dsa
    from dsa_layers.cache.kv_cache import OutOfPages
    from dsa_layers.checkpoint.loading import load_model
    from dsa_layers.families.precision import check_device
    from dsa_layers.generation.generator import Generator, TokenEvent
    from dsa_layers.generation.sampling import SamplingParams
    from dsa_layers.generation.tokenizer import Tokenizer

    texts = [options.text("--prompt", text) for text in args.prompt]
    stop = [options.text("--stop", text) for text in args.stop]
    params = SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed, stop)
    if not all(texts):
        raise ValueError("--prompt: must not be empty")
    if not args.checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory; a checkpoint holds config.json and safetensors")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device is None else args.device
    try:
        check_device(device)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    backend = dsa.backend() if device.startswith("cuda") else "reference"
    tokenizer = Tokenizer(args.checkpoint)
    prompts = texts
    if tokenizer.has_chat_template and not args.raw:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    model = load_model(
        args.checkpoint,
        device=device,
        dtype=args.dtype and getattr(torch, args.dtype),
        dequantize=args.dequantize,
        kv_cache=args.kv_cache,
    )
    generator = Generator(model, tokenizer, cache_tokens=args.cache_tokens, prefill_chunk=args.prefill_chunk)

    def show(event: TokenEvent) -> None:
        print(event.text, end="", flush=True)

    single = len(prompts) == 1
    try:
        completions = generator.generate(prompts, params, on_event=show if single else None)
    except OutOfPages as error:
        raise ValueError(error) from None
    if single:
        print()
    else:
        for prompt, completion in zip(texts, completions):
            print(f"[{prompt}]\n{completion.text}\n")
    say(f"{generator.throughput} ({device}, backend {backend})")
    failures = [completion.error for completion in completions if completion.error is not None]
    for failure in failures:
        say(f"dsa generate: {failure}")
    return 1 if failures else 0
