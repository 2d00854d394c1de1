"""`dsa compare`: the loss of sparse, windowed and dense attention on a text, and the number of keys that they read."""

import argparse
import contextlib
import math
import time
from dataclasses import asdict

from dsa_layers import Tokenizer
from dsa_layers.command.generate import read_text
from dsa_layers.command.model import load, place, read_files, start_ranks
from dsa_layers.command.parser import COMPARED_TOKENS, SELECTIONS, say_json
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.evaluation import all_keys, held_out_loss, keys_read, latest_keys


def compare(args: argparse.Namespace) -> int:
    start_ranks(args)  # sets args.device and args.dequantize, and checks the GPU's memory; launches no ranks
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
            if found["backend"] == "cute":  # warm up: kernels compile at their first call
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
    """Split the beginning of the text into pieces of equal length. Return the pieces' tokens and the number of
    predicted tokens per piece. Each piece begins with BOS if the tokenizer has a BOS token."""
    tokens = tokenizer.encode(text, add_bos=False)
    # The first token of a piece, BOS or a token of the text, is not predicted.
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
