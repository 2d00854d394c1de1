"""Tile configurations: what may be tried, and the measured winners, which ship as data.

A configuration is a frozen dataclass whose fields say with `choices` what may be tried, and whose method `fits` says
what the hardware allows. `dsa tune OP` times the candidates and writes dsa/tuned/ARCH/OP.json: the winner of each class
of shapes, which `tuned` reads.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

TUNED = Path(__file__).parent.parent / "tuned"
Config = TypeVar("Config")
_trial: dict[tuple[str, str, str], Any] = {}


def choices(*values: int) -> Any:
    """A field of a configuration, with the values to try."""
    return dataclasses.field(metadata={"choices": values})


def candidates(config_type: type[Config]) -> list[Config]:
    """Every combination of the fields' choices."""
    fields = dataclasses.fields(config_type)
    return [config_type(*values) for values in itertools.product(*(f.metadata["choices"] for f in fields))]


def tuned(config_type: type[Config], op: str, arch: str, shape_class: str) -> Config:
    """The winner of the op's kernel for an arch and this class of shapes, or the one on trial."""
    on_trial = _trial.get((op, arch, shape_class))
    return config_type(**_winners(path_of(op, arch))[shape_class]) if on_trial is None else on_trial


def path_of(op: str, arch: str) -> Path:
    """The file of the winners of an op's kernel for an arch."""
    return TUNED / arch / f"{op}.json"


@contextlib.contextmanager
def trial(op: str, arch: str, shape_class: str, config: Any) -> Iterator[None]:
    """Within the block, `tuned` gives this configuration. The op's bridge must not have the kernel at hand already."""
    _trial[op, arch, shape_class] = config
    try:
        yield
    finally:
        del _trial[op, arch, shape_class]


def write(op: str, winners: dict[str, Any], note: dict[str, str], path: Path) -> None:
    """Write {class: configuration} as the op's data; classes that were not searched stay as they are."""
    old = json.loads(path.read_text())["winners"] if path.exists() else {}
    new = old | {name: dataclasses.asdict(config) for name, config in winners.items()}
    path.write_text(json.dumps({"op": op, **note, "winners": new}, indent=1) + "\n")
    _winners.cache_clear()


@functools.cache
def _winners(path: Path) -> dict[str, dict[str, int]]:
    return json.loads(path.read_text())["winners"]
