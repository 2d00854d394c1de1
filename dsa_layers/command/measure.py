"""`dsa check`, `dsa compare` and `dsa verify`: test the ops, compare attention variants on a text, and test a
checkpoint on this machine."""

import argparse
import contextlib
import hashlib
import json
import math
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import dsa.check
from dsa_layers import Generator, SamplingParams, Tokenizer, options, read_config
from dsa_layers.command.generate import read_text
from dsa_layers.command.messages import say, say_json
from dsa_layers.command.model import join_ranks, load, place, read_files, start_ranks
from dsa_layers.command.parser import COMPARED_TOKENS, SELECTIONS
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.evaluation import all_keys, held_out_loss, keys_read, latest_keys
from dsa_layers.io.directory import checkpoint_directory
from dsa_layers.models.protocols import Model

_PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Q: What is 17 times 23?\nA:",
    "\u5317\u4eac\u662f",
)
_NEW_TOKENS = 32
_TEXT_TOKENS = 4096
_REFERENCE_TOKENS = 256  # tokens of the text for the references, which are slow
_NUMBERS = 2**26  # elements that `not_finite` converts to fp32 at a time


def check(args: argparse.Namespace) -> int:
    return dsa.check.check()


def compare(args: argparse.Namespace) -> int:
    start_ranks(args)  # check that the GPU can hold the model; without --gpus no ranks are launched
    directory, config, tokenizer = read_files(args)
    sequences, length = pieces(args, config, tokenizer, read_text(f"--text {args.text}", args.text.read_bytes()))
    model, top_k, found = load(args, directory), config.index_topk, place(args)
    if args.json:
        shape = {"text": str(args.text), "sequences": len(sequences), "length": length, "index_topk": top_k}
        say_json("start", checkpoint=str(directory), **found, **shape)
    else:
        weights = "dequantised weights, " if args.dequantize else ""
        print(f"{directory}: {weights}{args.device}, backend {found['backend']}")
        print(f"{args.text}: {len(sequences)} x {length} tokens\n")
        print("attention             loss  perplexity  keys read a token    of dense  seconds", flush=True)

    attentions = {
        "sparse": (f"sparse, top {top_k}", contextlib.nullcontext()),
        "latest": (f"the latest {top_k}", latest_keys(model)),
        "dense": ("dense, all keys", all_keys(model, length)),
    }
    counts = {}
    for attention, (name, selection) in attentions.items():
        with selection:
            if found["backend"] == "cute":  # warm up, because kernels compile at their first call
                held_out_loss(model, sequences[:1], chunk=args.prefill_chunk)
            began = time.perf_counter()
            loss = held_out_loss(model, sequences, chunk=args.prefill_chunk)
            seconds = time.perf_counter() - began
            keys = counts[attention] = keys_read(model, length)
        perplexity = math.exp(min(loss, 700.0))
        if args.json:
            figures = {"loss": loss, "perplexity": perplexity, "seconds": seconds, "share": keys.share}
            say_json("attention", attention=attention, tokens=len(sequences) * length, **figures, **asdict(keys))
        else:
            print(
                f"{name:<18}{loss:>8.4f}{perplexity:>12.4g}{keys.read:>19.1f}{keys.share:>12.0%}{seconds:>9.1f}",
                flush=True,
            )
    if args.json:
        return 0
    dense = counts["dense"]
    print(
        "\nLoss: nats a token. Of dense: the share of the keys that dense attention reads, "
        f"{dense.dense:.1f} keys for {dense.context:.1f} tokens of context."
    )
    if counts["sparse"].read == dense.read:
        print(
            f"All read the same keys: a token selects {top_k}, and sequences of {length} tokens have no more to select "
            "from. A longer --text or --length, or more --max-tokens, shows what selection leaves out."
        )
    return 0


def pieces(
    args: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer, text: str
) -> tuple[list[list[int]], int]:
    """Split the text into pieces of equal length. Return the pieces' tokens and the number of predicted tokens per
    piece. Each piece begins with BOS if the tokenizer has a BOS token."""
    tokens = tokenizer.encode(text, add_bos=False)
    # The first token of a piece is not predicted. It is BOS, or without BOS the first token of the piece's text.
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = len(tokens) - 1 + len(begin)
    if room < 2:
        raise ValueError(f"--text: must have at least 2 tokens to predict, got {args.text} with {max(room, 0)}")
    longest = min(config.max_position_embeddings, room)
    length = args.length or min(longest, SELECTIONS * config.index_topk, args.max_tokens or longest)
    if length > longest:
        raise ValueError(
            f"--length: must be at most {longest}, the shorter of the model's context of "
            f"{config.max_position_embeddings} tokens and the text's {room}, got {length}"
        )
    step = length + 1 - len(begin)
    count = max(1, min((args.max_tokens or COMPARED_TOKENS) // length, len(tokens) // step))
    return [begin + tokens[i * step : (i + 1) * step] for i in range(count)], length


def verify(args: argparse.Namespace) -> int:
    options.check_output("--report", args.report)
    text = read_text(f"--text {args.text}", args.text.read_bytes())
    # Load the drafter if the checkpoint has one, so that its tensors are checked too.
    args.draft = min(1, read_config(checkpoint_directory(args.checkpoint, weights=False)).num_nextn_predict_layers)
    exit_code = start_ranks(args)
    if exit_code is not None:
        return exit_code
    ranks = join_ranks(args)
    directory, config, tokenizer = read_files(args)
    tokens = tokenizer.encode(text)[: min(_TEXT_TOKENS + 1, config.max_position_embeddings)]
    if len(tokens) < 2:
        raise ValueError(f"--text: must have at least 2 tokens, got {args.text} with {len(tokens)}")
    model, report = load(args, directory, ranks), {}

    def add(part: str, found: dict[str, Any]) -> None:
        report[part] = found
        print(json.dumps({part: found}, ensure_ascii=False), flush=True)

    device = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    add("machine", place(args) | {"device": f"{1 if ranks is None else ranks.size} x {device}"})
    found = dsa.check.versions(dsa.check.PACKAGES)
    add("versions", {package: version for package, version in found.items() if version})
    fields = {name: getattr(config, name) for name in ("model_type", "num_hidden_layers", "num_nextn_predict_layers")}
    add("checkpoint", fields | {"config_sha256": hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()})
    add("tensors", {"checked": len(model.state_dict()), "not_finite": not_finite(model)})

    generator = Generator(model, tokenizer, cache_tokens=4096)
    first, second = (generator.generate(_PROMPTS, SamplingParams(max_tokens=_NEW_TOKENS)) for _ in range(2))
    same_twice = first == second
    add("generation", {"same_twice": same_twice, "completions": [(one.tokens, one.text) for one in first]})
    add("throughput", asdict(generator.throughput))
    losses = {"text": held_out_loss(model, [tokens], chunk=args.prefill_chunk)}
    few = [tokens[: _REFERENCE_TOKENS + 1]]
    losses["first_tokens"] = held_out_loss(model, few, chunk=args.prefill_chunk)
    with dsa.use_backend("reference"):
        losses["first_tokens_reference"] = held_out_loss(model, few, chunk=args.prefill_chunk)
    add("loss", losses)

    if ranks is None or ranks.rank == 0:
        args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"{args.report} is written. If these are published weights, please attach it to an issue of the project.")
    return 0 if same_twice and not report["tensors"]["not_finite"] else 1


def not_finite(model: Model) -> list[str]:
    """Return the names of all parameters and persistent buffers that contain NaN or infinity on any rank."""
    names = [
        name
        for name, x in model.state_dict().items()
        if x.is_floating_point() and not all(part.float().isfinite().all() for part in x.flatten().split(_NUMBERS))
    ]
    of_ranks = [names]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, names)
    return sorted(set().union(*of_ranks))
