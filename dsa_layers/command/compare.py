"""`dsa compare`: the loss of a checkpoint on text with sparse attention and with dense."""

import argparse
import contextlib
import math
from dataclasses import asdict

from dsa_layers.command.generate import read_text
from dsa_layers.command.messages import say_json
from dsa_layers.command.model import CheckpointFiles, load, read_files
from dsa_layers.command.parser import COMPARED_TOKENS, SELECTIONS
from dsa_layers.evaluation.held_out_loss import held_out_loss
from dsa_layers.evaluation.keys_read import KeyCounts, KeysRead
from dsa_layers.evaluation.selections import all_keys, latest_keys


def run(args: argparse.Namespace) -> int:
    files = read_files(args)
    sequences, length = pieces(args, files, read_text(f"--text {args.text}", args.text.read_bytes()))
    loaded = load(args, files)
    model, top_k = loaded.model, files.config.index_topk
    if args.json:
        say_json(
            "start",
            checkpoint=str(files.directory),
            device=loaded.device,
            backend=loaded.backend,
            dequantized=loaded.dequantized,
            text=str(args.text),
            sequences=len(sequences),
            length=length,
            index_topk=top_k,
        )
    else:
        weights = "dequantised weights, " if loaded.dequantized else ""
        print(f"{files.directory}: {weights}{loaded.device}, backend {loaded.backend}")
        print(f"{args.text}: {len(sequences)} x {length} tokens\n")
        print("attention             loss  perplexity  keys read a token    of dense  seconds", flush=True)

    attentions = {
        "sparse": (f"sparse, top {top_k}", contextlib.nullcontext()),
        "latest": (f"the latest {top_k}", latest_keys(model)),
        "dense": ("dense, all keys", all_keys(model, length)),
    }
    counts: dict[str, KeyCounts] = {}
    for attention, (name, selection) in attentions.items():
        with selection:
            if loaded.backend == "cute":  # kernels compile at their first call
                held_out_loss(model, sequences[:1], chunk=args.prefill_chunk)
            with KeysRead(model) as keys_read:
                result = held_out_loss(model, sequences, chunk=args.prefill_chunk)
        perplexity = math.exp(min(result.loss, 700.0))
        keys = counts[attention] = keys_read.counts()
        if args.json:
            say_json(
                "attention",
                attention=attention,
                perplexity=perplexity,
                **asdict(result),
                **asdict(keys),
                share=keys.share,
            )
        else:
            print(
                f"{name:<18}{result.loss:>8.4f}{perplexity:>12.4g}{keys.read:>19.1f}{keys.share:>12.0%}"
                f"{result.seconds:>9.1f}",
                flush=True,
            )
    if args.json:
        return 0
    sparse, dense = counts["sparse"], counts["dense"]
    print(
        "\nLoss: nats a token. Of dense: the share of the keys that dense attention reads, "
        f"{dense.dense:.1f} keys for {dense.context:.1f} tokens of context."
    )
    if sparse.read == dense.read:
        print(
            f"All read the same keys: a token selects {top_k}, and sequences of {length} tokens have no more to select "
            "from. A longer --text or --length, or more --max-tokens, shows what selection leaves out."
        )
    if loaded.backend == "reference":
        print("Seconds are those of PyTorch references, where gathering keys costs more than reading all of them.")
    return 0


def pieces(args: argparse.Namespace, files: CheckpointFiles, text: str) -> tuple[list[list[int]], int]:
    """Return pieces of the text of equal length, in tokens, and that length. Each piece begins with the token that
    begins a text."""
    tokens = files.tokenizer.encode(text, add_bos=False)
    # The first token is given, not predicted: the BOS token, or the text's own first token.
    begin = [] if files.tokenizer.bos_token_id is None else [files.tokenizer.bos_token_id]
    room = len(tokens) - 1 + len(begin)
    if room < 2:
        raise ValueError(f"--text: must have at least 2 tokens to predict, got {args.text} with {max(room, 0)}")
    context, most = files.config.max_position_embeddings, args.max_tokens
    length = args.length or min(context, SELECTIONS * files.config.index_topk, room, most or room)
    if length > min(context, room):
        raise ValueError(
            f"--length: must be at most {min(context, room)}, the shorter of the model's context of {context} tokens "
            f"and the text's {room}, got {length}"
        )
    most = most or max(COMPARED_TOKENS, length)
    if most < length:
        raise ValueError(f"--max-tokens: must be at least the {length} of --length, one sequence, got {most}")
    step = length + 1 - len(begin)
    count = max(1, min(most // length, len(tokens) // step))
    return [begin + tokens[i * step : (i + 1) * step] for i in range(count)], length
