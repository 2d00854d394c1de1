"""Tile configurations: the candidates, and the measured winners, which ship as data.

A configuration is a frozen dataclass; `choices` gives a field the values to try. `dsa tune OP` times the candidates and
writes the winner of each class of shapes to dsa/tuned/ARCH/OP.json, which `tuned` reads. If a cost model chooses an
op's configurations, the file contains only the classes in which the measured winner is faster than the model's choice;
`measured` reads these.
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
    """Return a dataclass field for a configuration, with the values to try."""
    return dataclasses.field(metadata={"choices": values})


def candidates(config_type: type[Config]) -> list[Config]:
    fields = dataclasses.fields(config_type)
    return [config_type(*values) for values in itertools.product(*(f.metadata["choices"] for f in fields))]


def tuned(config_type: type[Config], op: str, arch: str, shape_class: str) -> Config:
    """Return the op's winner for an arch and a class of shapes. During a `trial`, return the configuration on trial."""
    on_trial = _trial.get((op, arch, shape_class))
    return config_type(**_data(path_of(op, arch))["winners"][shape_class]) if on_trial is None else on_trial


def measured(op: str, arch: str, shape_class: str, multiprocessors: int) -> Any:
    """During a `trial`, return the configuration on trial. Otherwise return the fields of the class's winner as a dict,
    or None if the class has no winner or the winners were measured on a GPU with another number of SMs. H100 and H200
    have equal numbers of SMs. Only for ops with a cost model."""
    if (on_trial := _trial.get((op, arch, shape_class))) is not None:
        return on_trial
    data = _data(path_of(op, arch))
    return data["winners"].get(shape_class) if data["multiprocessors"] == multiprocessors else None


def path_of(op: str, arch: str) -> Path:
    return TUNED / arch / f"{op}.json"


@contextlib.contextmanager
def trial(op: str, arch: str, shape_class: str, config: Any) -> Iterator[None]:
    """Within the block, `tuned` and `measured` return `config` for this class of shapes.

    Recorded calls (dsa/runtime/recorded_calls.py) keep the configuration with which they were recorded, so call
    `dsa.runtime.op.forget_calls` at the block's begin and end.
    """
    _trial[op, arch, shape_class] = config
    try:
        yield
    finally:
        del _trial[op, arch, shape_class]


def write(op: str, winners: dict[str, Any], note: dict[str, str | int], path: Path) -> None:
    """Write the winners {class: configuration} to the op's file, and remove classes that map to None. The file's other
    classes stay, unless they were measured on a GPU with another number of SMs.

    note  further fields of the file: the GPU's name, its number of SMs ("multiprocessors"), the date
    """
    before = json.loads(path.read_text()) if path.exists() else {}
    old = before.get("winners", {})
    if "multiprocessors" in before and before["multiprocessors"] != note["multiprocessors"]:
        old = {}
    found = {name: None if config is None else dataclasses.asdict(config) for name, config in winners.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in (old | found).items() if fields]
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in {"op": op, **note}.items())
    path.write_text(f'{{\n{head} "winners": {{\n' + ",\n".join(lines) + "\n }\n}\n")
    _data.cache_clear()


@functools.cache
def _data(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
