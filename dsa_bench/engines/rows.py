"""The rows of the benchmark: every load on an engine with a model's layers, with and without the plugin."""

import json
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_bench.e2e.stacks import STACKS, with_layers
from dsa_bench.engines import loads
from dsa_bench.engines.turns import Side, run_on_both, started
from dsa_layers.models.family import published_config


@dataclass(frozen=True)
class Sizes:
    """layers: number of layers. rate: requests per second of the mixed load, about two thirds of the engine's most; the
    load also runs at 1.1 times this rate. cache_gib: memory of each side's KV cache."""

    layers: int
    rate: float
    cache_gib: int = 12


SIZES = {"V3.2": Sizes(12, 4.0), "GLM-5": Sizes(12, 4.0), "V4-Flash": Sizes(24, 6.0)}


def all_loads(model: str) -> list[loads.Load]:
    rate = SIZES[model].rate
    return [*loads.PROMPTS, *loads.STEPS, loads.mixed(rate), loads.mixed(1.1 * rate)]


def rows(
    engine: str,
    models: Sequence[str] = tuple(SIZES),
    *,
    only: str = "",
    rounds: int = 2,
    trace: bool = False,
    logs: Path | None = None,
    options: dict[str, Any] | None = None,
    done: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield a row per model and load.

    only    run the loads whose names contain this text
    rounds  runs of each load on each side, after one that warms up
    trace   add what each kernel took
    logs    directory for the engines' logs; None: a temporary one
    options engine options for both sides; they override the benchmark's
    done    shapes to skip
    """
    for model in models:
        left = [load for load in all_loads(model) if only in load.name and _shape(model, load) not in done]
        if not left:
            continue
        sizes, (file, fields) = SIZES[model], STACKS[model]
        config = published_config(file) | fields | with_layers(model, sizes.layers)
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            worker = [engine, directory, str(config["vocab_size"]), str(sizes.cache_gib), json.dumps(options or {})]
            with started(worker, logs or Path(directory)) as sides:
                for load in left:
                    found = {"model": model, "layers": sizes.layers, "load": load.name, "peer": engine}
                    yield {"shape": _shape(model, load)} | found | _row(sides, load, rounds, trace)


def _shape(model: str, load: loads.Load) -> str:
    return f"{model}, {load.name}"


def _row(sides: Sequence[Side], load: loads.Load, rounds: int, trace: bool) -> dict[str, Any]:
    found = run_on_both(sides, load, rounds, trace)
    alone, plugin = found["alone"], found["plugin"]
    if load.rate is not None:
        figure, time = f"{plugin['between_ms']:.2f} ms between tokens", "between_ms"
    elif load.tokens > 1:
        figure, time = f"{plugin['ms_per_step']:.2f} ms a step", "ms_per_step"
    else:
        figure, time = f"{plugin['tokens_per_second'] / 1e3:.1f}k tokens/s", "seconds"
    return {"figure": figure, "ratio": alone[time] / plugin[time]} | found
