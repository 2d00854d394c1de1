"""Run examples/train_indexer.py with a tiny model, short sequences and few measurements, on this repository's files.
usage: torchrun --nproc-per-node N tests/tiny_training.py CORPUS OUT ...

CORPUS is a folder that `write_corpus` has written. OUT and further arguments are those of train_indexer.py.
"""

import sys
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import train_indexer  # noqa: E402
from indexer_training import text  # noqa: E402
from indexer_training.stages import Plan  # noqa: E402

FIELDS = {"hidden_size": 128, "intermediate_size": 128, "n_routed_experts": 2, "index_topk": 16}


@dataclass
class TinyPlan(Plan):
    """Two ranks cannot divide the sequences evenly (61 tokens), nor the batches of the dense stage (3 sequences)."""

    steps: tuple[int, int, int] = (4, 4, 4)
    rates: tuple[float, float, float] = (2e-3, 3e-3, 3e-4)
    batch: tuple[int, int, int] = (3, 2, 2)
    every: tuple[int, int, int] = (4, 4, 4)
    length: int = 61
    vocab: int = 300
    held_out: int = 400
    fields: dict[str, object] = field(default_factory=lambda: FIELDS)


def write_corpus(root: Path) -> None:
    for i, path in enumerate(sorted((ROOT / "dsa" / "reference").rglob("[!_]*.py"))[:22]):
        (root / f"file{i:02}.py").write_text(path.read_text())
    files = sorted((ROOT / "dsa_layers" / "layers").glob("[!_]*.py"))
    write_package(root / "site-packages", "layers", {path.name: path.read_text() for path in files})


def write_package(
    site: Path, name: str, files: dict[str, str], metadata: str = "License-Expression: MIT", licence: str = "Do."
) -> None:
    """Write a package into `site` as pip does.

    files: {path in the package: content}. metadata: more lines of METADATA. licence: the text of LICENSE, which is not
    written if the text is empty.
    """
    info = site / f"{name}-1.0.dist-info"
    contents = {info / "METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}\n"}
    contents |= {info / "licenses" / "LICENSE": licence} if licence else {}
    contents |= {site / name / path: content for path, content in files.items()}
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    record = "".join(f"{path.relative_to(site).as_posix()},,\n" for path in contents)
    (info / "RECORD").write_text(record)


def text_of(root: Path) -> text.Text:
    return text.read_text(root, distributions(path=[str(root / "site-packages")]), sample_bytes=256)


def measure_little(set_attribute=setattr) -> None:
    """Measure on few sequences and positions, because measurements on a CPU would take longer than training. Accept
    small packages. set_attribute: `setattr`, or a MonkeyPatch's, which undoes the changes."""
    set_attribute(train_indexer, "FEW_SEQUENCES", 1)
    set_attribute(train_indexer, "POSITIONS", 8)
    set_attribute(text, "SMALLEST_PACKAGE", 1000)


if __name__ == "__main__":
    measure_little()
    train_indexer.Plan = TinyPlan
    corpus = Path(sys.argv.pop(1))
    train_indexer.read_text = lambda: text_of(corpus)
    train_indexer.main()
