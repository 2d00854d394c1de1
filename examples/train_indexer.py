"""A small DeepSeek-V3.2 model with its multi-token-prediction layer, which drafts, trained as the paper trains: dense,
then its indexers alone, then sparse.

usage: python examples/train_indexer.py OUT [--seconds DENSE WARMUP SPARSE] [--steps DENSE WARMUP SPARSE]
           [--batch DENSE WARMUP SPARSE] [--length N] [--vocab N] [--held-out N] [--config JSON] [--device cuda]
       torchrun --nproc-per-node N examples/train_indexer.py OUT ...

The text is Python: the standard library on this machine (PSF licence), and the packages that are installed beside it
under BSD, MIT, Apache-2.0 or PSF licences. Some files are held out whole. A stage ends when its steps or its seconds
are over, whichever comes first, and gives on the weights with which the held-out loss was lowest. Written to OUT, after
each stage:

losses.csv    the losses of every step; losses.png (with matplotlib)
table.md      held-out losses, how often drafts are right, recall, times
model/        the checkpoint in the published format, FP8 blocks with scales: `dsa generate OUT/model --prompt ...`;
              metrics.json in it has the table's figures, and what was trained on what; held_out.txt is a held-out
              file, which `dsa compare OUT/model --text OUT/model/held_out.txt` measures; LICENSE.python.txt and
              LICENSE.packages.txt are the licences of the text
weights.pt    the float weights

Of several processes the first one measures the stages' ends and writes.
"""

import argparse
import csv
import json
import math
import shutil
import time
from pathlib import Path

import tokenizers
import torch
from indexer_training import report, small_model
from indexer_training.corpus import Corpus, spread
from indexer_training.measure import acceptance, held_out_loss, recall
from indexer_training.small_model import build, fields, save
from indexer_training.source_files import library
from indexer_training.stages import ALONE, STAGES, Plan, Row, train_stage
from indexer_training.text import Text, read_text
from indexer_training.vocabulary import BEGIN, BYTES, tokenizer_config, train_tokenizer

from dsa_layers import Ranks, load_model, options
from dsa_layers.models.precision import check_device
from dsa_layers.parallel.launch import started_ranks
from dsa_layers.parallel.ranks import agreed, join

# How the model writes best; generation_config.json.
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}

# Sequences of each held-out text that a running stage measures its loss on, and that acceptance is measured on. Recall
# is measured on those of the library.
FEW_SEQUENCES = 16
# Positions in each of these sequences after which drafts are compared.
POSITIONS = 64
# Tokens of a sequence: a position and three drafts.
SHORTEST = 4


def run(out: Path, plan: Plan, device: str, text: Text, ranks: Ranks = ALONE) -> dict[str, object]:
    """Trains and measures, and after each stage writes into `out` what there is by then; returns the metrics. Ranks
    train together, and the first one does the rest."""
    began = time.perf_counter()
    torch.manual_seed(0)
    tokenizer = train_tokenizer(text.train, plan.vocab) if ranks.rank == 0 else None
    if ranks.size > 1:
        made = agreed(ranks, lambda: tokenizer.to_str())
        tokenizer = tokenizers.Tokenizer.from_str(made)
    corpus = Corpus.of(text, tokenizer)
    changes = plan.fields | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": plan.length}
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = build(changes, dtype).to(device)
    top_k, train = model.config.index_topk, corpus.train.to(device)
    held_out = {name: corpus.first_pieces(name, plan.length, plan.held_out).to(device) for name in corpus.held_out}
    held_out = {name: tokens for name, tokens in held_out.items() if len(tokens)}
    sizes = {name: corpus.bytes_in(tokens) for name, tokens in held_out.items()}
    few_of = {name: spread(tokens, FEW_SEQUENCES) for name, tokens in held_out.items()}
    few = torch.cat([*few_of.values()])
    few_size = corpus.bytes_in(few)
    losses, watched, recalls, times = {}, {}, {}, {}
    metrics: dict[str, object] = {
        "plan": {"steps": plan.steps, "seconds": plan.seconds, "rates": plan.rates, "batch": plan.batch}
        | {"length": plan.length},
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": model.config.num_hidden_layers,
            "index_topk": top_k,
            "vocabulary": tokenizer.get_vocab_size(),
        },
        "machine": torch.cuda.get_device_name() if dtype == torch.bfloat16 else "CPU",
        "processes": ranks.size,
        "data": text.facts | {"train_tokens": len(train), "bytes_a_token": sizes["library"] / _predicted(held_out)},
        "stages": times,
        "held_out": {"bytes": sizes, "loss": losses, "while": watched},
        "recall": recalls,
    }
    rows: list[Row] = []
    if ranks.rank == 0:
        sources = f"the library and {len(text.facts['packages'])} packages"
        print(f"{len(train) / 1e6:.1f}M tokens of {sources}; {time.perf_counter() - began:.0f} s", flush=True)

    def announce(when: str, size: int) -> None:
        if ranks.rank == 0:
            print(f"{when}: measuring on {size} bytes of held-out text", flush=True)

    def nats_a_byte(model: torch.nn.Module, name: str, keys: int) -> float:
        tokens = held_out[name]
        return held_out_loss(model, tokens, keys) * (tokens.numel() - len(tokens)) / sizes[name]

    for name in STAGES:
        keys = plan.length if name == "dense" else top_k
        points = watched[name] = []

        def watch(step: int, name: str = name, keys: int = keys, points: list = points) -> float:
            announce(f"{name}, step {step}", few_size)
            loss = held_out_loss(model, few, keys) * (few.numel() - len(few)) / few_size
            points.append((step, loss))
            return loss

        of_stage, times[name] = train_stage(model, name, plan, train, watch, ranks)
        if ranks.rank > 0:
            continue
        rows += of_stage
        announce(f"{name}, end", sum(sizes.values()))
        for files in held_out:
            own = losses.setdefault(files, {})
            own[f"{name}, all keys"] = nats_a_byte(model, files, plan.length)
            own[f"{name}, top-k"] = nats_a_byte(model, files, top_k)
        recalls[name] = vars(recall(model, few_of["library"], top_k, dense=name != "sparse"))
        write_checkpoint(model, tokenizer, text, out / "model", fields(changes, quantized=True))
        quantised = load_model(out / "model", device=device, drafter=True, progress=False)
        for files in held_out:
            losses[files][f"{name}, top-k, FP8"] = nats_a_byte(quantised, files, top_k)
        metrics["acceptance"] = vars(acceptance(quantised, few, positions=POSITIONS))
        metrics["sample"] = {"text": text.sample, "loss": sample_loss(out / "model", tokenizer, text.sample)}
        metrics["seconds"] = time.perf_counter() - began
        write_run(out, model, metrics, rows)
        print(name, times[name], json.dumps(losses), json.dumps(metrics["acceptance"]), flush=True)
    return metrics


def _predicted(held_out: dict[str, torch.Tensor]) -> int:
    """Tokens of the library's sequences behind their first ones."""
    return held_out["library"].numel() - len(held_out["library"])


def write_run(out: Path, model: torch.nn.Module, metrics: dict[str, object], rows: list[Row]) -> None:
    """What is not the checkpoint's: float weights, losses, metrics and what is made of them."""
    torch.save(model.state_dict(), out / "weights.pt")
    with (out / "losses.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["stage", "step", "language loss", "drafter's loss", "indexer loss"])
        for row in rows:
            values = (f"{value:.5f}" for value in (row.language, row.drafted, row.indexer))
            writer.writerow([row.stage, row.step, *values])
    (out / "model" / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    report.write(out)


def write_checkpoint(
    model: torch.nn.Module,
    tokenizer: tokenizers.Tokenizer,
    text: Text,
    directory: Path,
    config: dict[str, object],
) -> None:
    """Weights, configuration, tokenizer, a held-out text and the licences of the text."""
    save(model, directory, config)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    context = config["max_position_embeddings"]
    for name, content in (
        ("tokenizer_config.json", tokenizer_config(context)),
        ("generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": BEGIN, **SAMPLING}),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "held_out.txt").write_text(text.excerpt[1], newline="")
    (directory / "LICENSE.packages.txt").write_text(text.licences, encoding="utf-8")
    licence = library() / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, directory / "LICENSE.python.txt")


def sample_loss(checkpoint: Path, tokenizer: tokenizers.Tokenizer, sample: str) -> float:
    """Nats a token of a text behind BEGIN, by the written checkpoint, on the CPU: what any machine can repeat."""
    model = load_model(checkpoint, device="cpu", progress=False)
    tokens = torch.tensor([[BEGIN, *tokenizer.encode(sample, add_special_tokens=False).ids]])
    return held_out_loss(model, tokens, model.config.index_topk)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text[:60]!r}")
    return value


def _fields(text: str) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:60]!r}: {error}") from None
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:60]!r}")
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("out", type=options.path, metavar="OUT", help="directory for the checkpoint, losses and tables")
    for name, kind, what in (
        ("seconds", _seconds, "of each stage at most"),
        ("steps", options.positive, "of each stage at most"),
        ("batch", options.positive, "sequences a step of each stage"),
    ):
        default = getattr(Plan, name)
        parser.add_argument(
            f"--{name}",
            type=kind,
            nargs=3,
            default=default,
            metavar=("DENSE", "WARMUP", "SPARSE"),
            help=f"{what} (default: {' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--length",
        type=options.positive,
        default=Plan.length,
        metavar="N",
        help=f"tokens of a sequence, at least {SHORTEST} (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab",
        type=options.positive,
        default=Plan.vocab,
        metavar="N",
        help=f"tokens of the vocabulary, at least {BYTES} (default: %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=options.positive,
        default=Plan.held_out,
        metavar="N",
        help="bytes of each held-out text that losses are measured on, at least one sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        type=_fields,
        default={},
        metavar="JSON",
        help="fields of config.json that replace the example's: "
        """'{"num_attention_heads": 64, "index_n_heads": 32, "index_topk": 512}'""",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is a GPU, else cpu)")
    args = parser.parse_args()
    if args.vocab < BYTES:
        parser.error(f"--vocab: must be at least {BYTES}, the bytes and the token that begins a file, got {args.vocab}")
    if args.length < SHORTEST:
        parser.error(f"--length: must be at least {SHORTEST}, got {args.length}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"OUT: must be a directory, got {args.out}")
    try:
        small_model.check(args.config, args.length)
    except ValueError as error:
        parser.error(f"--config: {error}")
    ranks, device = ALONE, args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_device(device)
    except ValueError as error:
        parser.error(f"--{error}")
    if started_ranks() is not None:
        ranks, own = join(device)
        device = str(own)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"OUT: {error.filename}: {error.strerror}")
    stages = {name: tuple(getattr(args, name)) for name in ("seconds", "steps", "batch")}
    plan = Plan(**stages, length=args.length, vocab=args.vocab, held_out=args.held_out, fields=args.config)
    run(args.out, plan, device, read_text(), ranks)
    if ranks.rank == 0:
        print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
