"""`dsa compare`: the loss of a checkpoint on text with sparse attention and with dense."""

import argparse
import contextlib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.command.model_options import CheckpointFiles, LoadedModel, add_model_options, load, read_files
from dsa_layers.command.prompt_sources import read_text_file
from dsa_layers.command.streams import say_json

if TYPE_CHECKING:
    from dsa_layers.evaluation.held_out_loss import HeldOutLoss
    from dsa_layers.evaluation.keys_read import KeyCounts

# Of what the model that comes with dsa was not trained on; LICENSE.python.txt beside it.
HELD_OUT_TEXT = SHIPPED_MODEL / "held_out.txt"

# Of the text, unless somebody asks for another number.
_TOKENS = 4096

# Contexts so many times as long as what a token selects, where the model has them, show what selection leaves out.
_SELECTIONS = 16

_JSON = """\
With --json the standard output is one JSON object a line, each with the key "event":
  start      checkpoint, device, backend, dequantized, text, sequences, length, index_topk
  attention  attention ("sparse", "latest" or "dense"), loss, perplexity, tokens, seconds, read, dense (what dense
             attention over the same cache reads), context, share (read / dense), most_read, most_dense, longest_context
  error      error, exit_code: nothing follows"""


@dataclass(frozen=True)
class _Row:
    """What one kind of attention gave."""

    attention: str
    result: "HeldOutLoss"
    keys: "KeyCounts"

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.result.loss, 700.0))


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="loss, perplexity and keys read on a text: sparse attention beside dense",
        description="The loss of the same weights with the keys that the indexers select, with as many keys that are "
        "the latest, and with all keys.",
        epilog=_JSON,
    )
    parser.set_defaults(run=run)
    add_model_options(parser)
    parser.add_argument(
        "--text",
        type=options.path,
        metavar="FILE",
        default=HELD_OUT_TEXT,
        help="UTF-8; to be one that the model was not trained on (default: a module of Python's standard library that "
        "was held out when the model that comes with dsa was trained)",
    )
    parser.add_argument(
        "--length",
        type=options.several,
        metavar="N",
        help=f"tokens of a sequence, at least 2 (default: the model's context, {_SELECTIONS} times what a token "
        "selects, the text, or --max-tokens if that is given, whichever is shortest)",
    )
    parser.add_argument(
        "--max-tokens",
        type=options.several,
        metavar="N",
        help="of the text, its beginning, in whole sequences; at least --length if that is given (default: "
        f"{_TOKENS}, or one sequence if that is longer)",
    )
    parser.add_argument("--json", action="store_true", help="print events in JSON, see below (default: off)")


def run(args: argparse.Namespace) -> int:
    text = read_text_file("--text", args.text)
    files = read_files(args)
    sequences, length = _sequences(args, files, text)
    loaded = load(args, files)
    top_k = loaded.model.config.index_topk
    if args.json:
        shape = {"sequences": len(sequences), "length": length, "index_topk": top_k}
        say_json("start", **loaded.facts(), text=str(args.text), **shape)
    else:
        weights = "dequantised weights, " if loaded.dequantized else ""
        print(f"{_from_here(loaded.checkpoint)}: {weights}{loaded.device}, backend {loaded.backend}")
        print(f"{_from_here(args.text)}: {len(sequences)} x {length} tokens\n", flush=True)
    names = {"sparse": f"sparse, top {top_k}", "latest": f"the latest {top_k}", "dense": "dense, all keys"}
    rows = []
    for name in names:
        row = _row(loaded, name, sequences, length, args.prefill_chunk)
        if args.json:
            say_json("attention", **_event(row))
        else:
            if not rows:
                print(_head(row))
            print(_line(names[name], row), flush=True)
        rows.append(row)
    if not args.json:
        _explain(loaded, rows, length, top_k)
    return 0


def _sequences(args: argparse.Namespace, files: CheckpointFiles, text: str) -> tuple[list[list[int]], int]:
    """The text's tokens in pieces of equal length, each behind the token that begins a text, and that length."""
    config, tokenizer = files.config, files.tokenizer
    tokens = tokenizer.encode(text, add_bos=False)
    # A text's beginning is given, not predicted: the BOS token, or its own first token.
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room = len(tokens) - 1 + len(begin)
    if room < 2:
        raise ValueError(f"--text: must have at least 2 tokens to predict, got {args.text} with {max(room, 0)}")
    context = config.max_position_embeddings
    most = args.max_tokens
    if args.length is None:
        length = min(context, _SELECTIONS * config.index_topk, room, room if most is None else most)
    else:
        length = args.length
    if length > min(context, room):
        raise ValueError(
            f"--length: must be at most {min(context, room)}, the shorter of the model's context of {context} tokens "
            f"and the text's {room}, got {length}"
        )
    if most is None:
        most = max(_TOKENS, length)
    elif most < length:
        raise ValueError(f"--max-tokens: must be at least the {length} of --length, one sequence, got {most}")
    step = length + 1 - len(begin)
    count = max(1, min(most // length, len(tokens) // step))
    return [begin + tokens[i * step : (i + 1) * step] for i in range(count)], length


def _row(loaded: LoadedModel, name: str, sequences: list[list[int]], length: int, chunk: int) -> _Row:
    from dsa_layers.evaluation.held_out_loss import held_out_loss
    from dsa_layers.evaluation.keys_read import KeysRead
    from dsa_layers.evaluation.selections import all_keys, latest_keys

    model = loaded.model
    selections = {"sparse": contextlib.nullcontext, "latest": lambda: latest_keys(model)}
    with selections.get(name, lambda: all_keys(model, length))():
        if loaded.backend == "cute":  # kernels compile at their first call
            held_out_loss(model, sequences[:1], chunk=chunk)
        with KeysRead(model) as keys:
            result = held_out_loss(model, sequences, chunk=chunk)
    return _Row(name, result, keys.counts())


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _event(row: _Row) -> dict[str, object]:
    return {
        "attention": row.attention,
        "perplexity": row.perplexity,
        **asdict(row.result),
        **asdict(row.keys),
        "share": row.keys.share,
    }


def _head(row: _Row) -> str:
    of = "of context" if row.keys.keys_are_tokens else "of dense"
    return f"{'attention':<18}{'loss':>8}{'perplexity':>12}{'keys read a token':>19}{of:>12}{'seconds':>9}"


def _line(name: str, row: _Row) -> str:
    result, keys = row.result, row.keys
    return (
        f"{name:<18}{result.loss:>8.4f}{row.perplexity:>12.4g}{keys.read:>19.1f}{keys.share:>12.0%}"
        f"{result.seconds:>9.1f}"
    )


def _explain(loaded: LoadedModel, rows: list[_Row], length: int, top_k: int) -> None:
    sparse, *_, dense = (row.keys for row in rows)
    if sparse.keys_are_tokens:
        print("\nLoss: nats a token. Of context: the share of the tokens up to itself that a token reads.")
    else:
        print(
            "\nLoss: nats a token. Of dense: the share of the keys that dense attention over the same cache reads. "
            "Keys are the\ntokens of a window and compressed entries, each of several tokens: "
            f"{dense.dense:.1f} keys for {dense.context:.1f} tokens of context."
        )
    if sparse.read == dense.read:
        print(
            f"All read the same keys: a token selects {top_k}, and sequences of {length} tokens have no more to select "
            "from. A longer --text or --length, or more --max-tokens, shows what selection leaves out."
        )
    if loaded.backend == "reference":
        print("Seconds are those of PyTorch references, where gathering keys costs more than reading all of them.")
