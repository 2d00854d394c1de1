"""A small byte-level DeepSeek-V3.2 model, trained as the paper trains: dense, then its indexer alone, then sparse.

usage: python examples/train_indexer.py OUT [--steps DENSE WARMUP SPARSE] [--device cuda]

The text is the Python standard library on this machine (PSF licence): its sources. Written to OUT: losses.csv and the
model's float weights, model.pt.
"""

import argparse
import csv
import json
import random
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import vendored
from dsa_layers.config import read_config
from dsa_layers.indexer_stage import IndexerStage
from dsa_layers.models.deepseek_v32 import DeepseekV32ForCausalLM
from dsa_layers.models.precision import Precision
from dsa_layers.sequence_batch import SequenceBatch

# Bytes, and a token that begins a file.
VOCAB, BEGIN = 257, 256
FIELDS = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "index_topk": 128,
    "index_n_heads": 32,
    "index_head_dim": 64,
}


@dataclass
class Plan:
    """Steps and learning rates of the dense, the warm-up and the sparse stage; the tokens of a sequence, and how many
    sequences a step has; fields that differ from FIELDS."""

    steps: tuple[int, int, int] = (3000, 500, 1500)
    rates: tuple[float, float, float] = (1e-3, 1e-3, 3e-4)
    length: int = 1024
    batch: int = 16
    fields: dict[str, object] = field(default_factory=dict)


def corpus() -> tuple[list[bytes], list[bytes]]:
    """(training files, held-out files) of the standard library: every twentieth is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and "test" not in path.parts
    )
    texts = [path.read_bytes() for path in files]
    texts = [text for text in texts if len(text) > 256]
    return [t for i, t in enumerate(texts) if i % 20], texts[::20]


def sequences(texts: list[bytes], length: int, seed: int) -> Iterator[torch.Tensor]:
    """int64 [length + 1]: a random piece of a random file, from its beginning if it is short."""
    choose = random.Random(seed)
    weights = [len(text) for text in texts]
    while True:
        (text,) = choose.choices(texts, weights)
        begin = choose.randrange(max(1, len(text) - length))
        piece = text[begin : begin + length]
        tokens = torch.full((length + 1,), BEGIN)
        tokens[1 : 1 + len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        yield tokens


def build(fields: dict[str, object]) -> DeepseekV32ForCausalLM:
    """The published configuration with this file's sizes and `fields`; random weights in fp32."""
    published = json.loads((Path(vendored.__file__).parent / "deepseek_v32_config.json").read_text())
    published.pop("quantization_config")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(published | FIELDS | fields))
        config = read_config(directory)
    model = DeepseekV32ForCausalLM(config, Precision(torch.float32, False, False, "model"))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a byte of tokens [B, L + 1], each sequence by itself."""
    count, length = tokens.shape[0], tokens.shape[1] - 1
    batch = SequenceBatch.without_cache([length] * count, tokens.device)
    logits = model(tokens[:, :-1].flatten(), batch, all_tokens=True)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def train(plan: Plan, device: str, note: Callable[[str, int, float, float], None]) -> DeepseekV32ForCausalLM:
    """All three stages; note(stage, step, language loss, indexers' loss) after every step."""
    torch.manual_seed(0)
    model = build(plan.fields).to(device)
    texts = sequences(corpus()[0], plan.length, seed=0)
    for name, steps, rate in zip(("dense", "warmup", "sparse"), plan.steps, plan.rates):
        stage = None if name == "dense" else IndexerStage(model, name)
        parameters = stage.parameters() if name == "warmup" else list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
        for step in range(steps):
            tokens = torch.stack([next(texts) for _ in range(plan.batch)]).to(device)
            loss, of_indexers = _losses(model, tokens, stage)
            optimizer.zero_grad(set_to_none=True)
            (of_indexers if name == "warmup" else loss + of_indexers).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            note(name, step, loss.item(), of_indexers.item())
    return model


def _losses(model: nn.Module, tokens: torch.Tensor, stage: IndexerStage | None) -> tuple[torch.Tensor, torch.Tensor]:
    if stage is None:
        return language_loss(model, tokens), torch.zeros((), device=tokens.device)
    with stage:
        loss = language_loss(model, tokens)
        return loss, stage.loss()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, nargs=3, default=Plan.steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "losses.csv").open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["stage", "step", "language loss", "indexer loss"])
        model = train(Plan(steps=tuple(args.steps)), args.device, lambda *row: writer.writerow(row))
    torch.save(model.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()
