"""A small byte-level DeepSeek-V3.2 model, trained as the paper trains: dense, then its indexers alone, then sparse.

usage: python examples/train_indexer.py OUT [--steps DENSE WARMUP SPARSE] [--batch DENSE WARMUP SPARSE] [--device cuda]

The text is the Python standard library on this machine (PSF licence): its sources with their docstrings, every
twentieth file held out. Written to OUT:

losses.csv    both losses of every step
metrics.json  what was trained on what, held-out losses, recall, times
table.md      the same to be read, and losses.png (with matplotlib)
model/        the checkpoint in the published format, FP8 blocks with scales: `dsa generate OUT/model --prompt ...`
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
from indexer_training.stages import STAGES, Plan, train_stage

from dsa_layers.export import save_fp8_checkpoint
from dsa_layers.models.loading import load_model

# Held-out sequences that recall is measured on, and those of every loss in the tables; how often the dense stage looks
# at the former.
RECALL_SEQUENCES, LOSS_SEQUENCES, WATCHED = 16, 128, 20


def run(out: Path, plan: Plan, device: str, corpus: Corpus) -> dict[str, object]:
    """Trains, measures and writes everything into `out`; returns the metrics."""
    began = time.perf_counter()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = build(plan.fields, dtype).to(device)
    top_k, text = model.config.index_topk, corpus.train.to(device)
    held_out = pieces(corpus.held_out, plan.length)[:LOSS_SEQUENCES].to(device)
    few = held_out[:: max(1, len(held_out) // RECALL_SEQUENCES)][:RECALL_SEQUENCES]
    config = {name: plan.fields.get(name, value) for name, value in fields(plan.fields, quantized=True).items()}
    metrics: dict[str, object] = {
        "plan": {"steps": plan.steps, "rates": plan.rates, "batch": plan.batch, "length": plan.length},
        "model": {
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": config["num_hidden_layers"],
            "index_topk": top_k,
        },
        "machine": torch.cuda.get_device_name() if dtype == torch.bfloat16 else "CPU",
        "data": corpus.facts(),
        "stages": {},
        "held_out": {"bytes": held_out.numel() - len(held_out), "loss": {}, "while_dense": []},
        "recall": {},
    }
    losses = metrics["held_out"]["loss"]
    rows = []

    def measure(after: str) -> None:
        losses[f"{after}, all keys"] = held_out_loss(model, held_out, plan.length)
        losses[f"{after}, top-k"] = held_out_loss(model, held_out, top_k)
        metrics["recall"][after] = vars(recall(model, few, top_k, dense=after != "sparse"))
        print(after, {name: round(loss, 4) for name, loss in losses.items() if name.startswith(after)}, flush=True)

    def watch(step: int) -> None:
        if (step + 1) % max(1, plan.steps[0] // WATCHED) == 0:
            metrics["held_out"]["while_dense"].append((step, held_out_loss(model, few, plan.length)))

    for name in STAGES:
        stage_rows, metrics["stages"][name] = train_stage(model, name, plan, text, watch)
        rows += stage_rows
        print(name, metrics["stages"][name], stage_rows[-1] if stage_rows else "", flush=True)
        measure(name)

    checkpoint = out / "model"
    write_checkpoint(model, checkpoint, config)
    losses["sparse, top-k, FP8"] = held_out_loss(
        load_model(checkpoint, device=device, progress=False).requires_grad_(False), held_out, top_k
    )
    metrics["sample"] = {"text": corpus.sample, "loss": sample_loss(checkpoint, corpus.sample)}
    metrics["seconds"] = time.perf_counter() - began
    metrics["machine_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30 if dtype == torch.bfloat16 else None
    with (out / "losses.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["stage", "step", "language loss", "indexer loss"])
        writer.writerows([row.stage, row.step, f"{row.language:.5f}", f"{row.indexer:.5f}"] for row in rows)
    (checkpoint / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    report.write(out)
    return metrics


def write_checkpoint(model: torch.nn.Module, directory: Path, config: dict[str, object]) -> None:
    """Weights, configuration, tokenizer and the licence of the text."""
    save_fp8_checkpoint(model, directory, config)
    byte_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    context = config["max_position_embeddings"]
    for name, content in (
        ("tokenizer_config.json", tokenizer_config(context)),
        ("generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": BEGIN}),
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
    args.out.mkdir(parents=True, exist_ok=True)
    plan = Plan(steps=tuple(args.steps), batch=tuple(args.batch))
    run(args.out, plan, args.device, read_corpus())
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
