"""A small byte-level DeepSeek-V3.2 model, trained as the paper trains: dense, then its indexers alone, then sparse.

usage: python examples/train_indexer.py OUT [--steps DENSE WARMUP SPARSE] [--batch DENSE WARMUP SPARSE] [--device cuda]
       torchrun --nproc-per-node N examples/train_indexer.py OUT ...

The text is the Python standard library on this machine (PSF licence): its sources with their docstrings, every
twentieth file held out. Written to OUT:

losses.csv    both losses of every step; losses.png (with matplotlib)
table.md      held-out losses, recall, times
model/        the checkpoint in the published format, FP8 blocks with scales: `dsa generate OUT/model --prompt ...`;
              metrics.json in it has the table's figures, and what was trained on what; held_out.txt is a held-out
              file, which `dsa compare OUT/model --text OUT/model/held_out.txt` measures
weights.pt    the float weights

Of several processes the first one measures and writes.
"""

import argparse
import csv
import json
import shutil
import time
from pathlib import Path

import torch
from indexer_training import report
from indexer_training.corpus import BEGIN, Corpus, library, pieces, read_corpus
from indexer_training.measure import held_out_loss, recall
from indexer_training.small_model import build, byte_tokenizer, fields, tokenizer_config
from indexer_training.stages import ALONE, STAGES, Plan, Row, train_stage

from dsa_layers.checkpoint.export import save_fp8_checkpoint
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.parallel.environment import started_ranks
from dsa_layers.parallel.process_group import join
from dsa_layers.parallel.ranks import Ranks

# How the model writes best; generation_config.json.
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}

# Held-out sequences that recall is measured on, and those of every loss in the tables; how often the dense stage looks
# at the former.
RECALL_SEQUENCES, LOSS_SEQUENCES, WATCHED = 16, 128, 20


def run(out: Path, plan: Plan, device: str, corpus: Corpus, ranks: Ranks = ALONE) -> dict[str, object]:
    """Trains and measures, and after each stage writes into `out` what there is by then; returns the metrics. Ranks
    train together, and the first one does the rest."""
    began = time.perf_counter()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = build(plan.fields, dtype).to(device)
    top_k, text = model.config.index_topk, corpus.train.to(device)
    held_out = pieces(corpus.held_out, plan.length)[:LOSS_SEQUENCES].to(device)
    few = held_out[:: max(1, len(held_out) // RECALL_SEQUENCES)][:RECALL_SEQUENCES]
    losses, while_dense, recalls, times = {}, [], {}, {}
    metrics: dict[str, object] = {
        "plan": {"steps": plan.steps, "rates": plan.rates, "batch": plan.batch, "length": plan.length},
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": model.config.num_hidden_layers,
            "index_topk": top_k,
        },
        "machine": torch.cuda.get_device_name() if dtype == torch.bfloat16 else "CPU",
        "processes": ranks.size,
        "data": corpus.facts(),
        "stages": times,
        "held_out": {"bytes": held_out.numel() - len(held_out), "loss": losses, "while_dense": while_dense},
        "recall": recalls,
    }
    rows: list[Row] = []

    def watch(step: int) -> None:
        if ranks.rank == 0 and (step + 1) % max(1, plan.steps[0] // WATCHED) == 0:
            while_dense.append((step, held_out_loss(model, few, plan.length)))

    for name in STAGES:
        of_stage, times[name] = train_stage(model, name, plan, text, watch, ranks)
        if ranks.rank > 0:
            continue
        rows += of_stage
        losses[f"{name}, all keys"] = held_out_loss(model, held_out, plan.length)
        losses[f"{name}, top-k"] = held_out_loss(model, held_out, top_k)
        recalls[name] = vars(recall(model, few, top_k, dense=name != "sparse"))
        write_checkpoint(model, out / "model", fields(plan.fields, quantized=True))
        quantised = load_model(out / "model", device=device, progress=False)
        losses[f"{name}, top-k, FP8"] = held_out_loss(quantised, held_out, top_k)
        metrics["sample"] = {"text": corpus.sample, "loss": sample_loss(out / "model", corpus.sample)}
        metrics["seconds"] = time.perf_counter() - began
        write_run(out, model, metrics, rows)
        (out / "model" / "held_out.txt").write_text(corpus.excerpt[1], newline="")
        print(
            name, times[name], {key: round(loss, 4) for key, loss in losses.items() if key.startswith(name)}, flush=True
        )
    return metrics


def write_run(out: Path, model: torch.nn.Module, metrics: dict[str, object], rows: list[Row]) -> None:
    """What is not the checkpoint's: float weights, losses, metrics and what is made of them."""
    torch.save(model.state_dict(), out / "weights.pt")
    with (out / "losses.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["stage", "step", "language loss", "indexer loss"])
        writer.writerows([row.stage, row.step, f"{row.language:.5f}", f"{row.indexer:.5f}"] for row in rows)
    (out / "model" / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    report.write(out)


def write_checkpoint(model: torch.nn.Module, directory: Path, config: dict[str, object]) -> None:
    """Weights, configuration, tokenizer and the licence of the text."""
    save_fp8_checkpoint(model, directory, config)
    byte_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    context = config["max_position_embeddings"]
    for name, content in (
        ("tokenizer_config.json", tokenizer_config(context)),
        ("generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": BEGIN, **SAMPLING}),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    licence = library() / "LICENSE.txt"
    if licence.exists():
        shutil.copyfile(licence, directory / "LICENSE.python.txt")


def sample_loss(checkpoint: Path, sample: str) -> float:
    """Nats a byte of a text behind BEGIN, by the written checkpoint, on the CPU: what any machine can repeat."""
    model = load_model(checkpoint, device="cpu", progress=False)
    tokens = torch.tensor([[BEGIN, *sample.encode()]])
    return held_out_loss(model, tokens, model.config.index_topk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, nargs=3, default=Plan.steps)
    parser.add_argument("--batch", type=int, nargs=3, default=Plan.batch)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    ranks, device = ALONE, args.device
    if started_ranks() is not None:
        ranks, own = join(device)
        device = str(own)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=tuple(args.steps), batch=tuple(args.batch))
    run(args.out, plan, device, read_corpus(), ranks)
    if ranks.rank == 0:
        print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
