"""examples/train_indexer.py with a tiny model, short sequences and few measurements, on this repository's files.

usage: torchrun --nproc-per-node N tests/tiny_training.py CORPUS OUT ...
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import train_indexer  # noqa: E402
from indexer_training.corpus import read_corpus  # noqa: E402
from indexer_training.stages import Plan  # noqa: E402

FIELDS = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "index_topk": 16}


@dataclass
class TinyPlan(Plan):
    """Sequences that do not come apart evenly, and in the dense stage one that one of two ranks has more."""

    steps: tuple[int, int, int] = (4, 4, 4)
    rates: tuple[float, float, float] = (2e-3, 3e-3, 3e-4)
    batch: tuple[int, int, int] = (3, 2, 2)
    length: int = 61
    fields: dict[str, object] = field(default_factory=lambda: FIELDS)


def write_corpus(root: Path) -> None:
    """The files of `dsa/reference` as a library."""
    for i, path in enumerate(sorted((ROOT / "dsa" / "reference").rglob("[!_]*.py"))[:22]):
        (root / f"file{i:02}.py").write_text(path.read_text())


def corpus_of(root: Path):
    return read_corpus(root, sample_bytes=256)


if __name__ == "__main__":
    train_indexer.RECALL_SEQUENCES, train_indexer.LOSS_SEQUENCES = 1, 2
    train_indexer.Plan = TinyPlan
    corpus = Path(sys.argv.pop(1))
    train_indexer.read_corpus = lambda: corpus_of(corpus)
    train_indexer.main()
