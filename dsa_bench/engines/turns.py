"""Two processes that hold the engine, with and without the plugin, and take turns."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dsa_bench.engines.loads import Load

SIDES = ("alone", "plugin")
LOG_LINES = 20  # of a process that ended


class Side:
    """A worker process."""

    def __init__(self, side: str, arguments: Sequence[str], log: Path) -> None:
        self.side, self._log = side, log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsa_bench.engines.worker", *arguments],
                env=os.environ | {"DSA_ENGINE": str(int(side == "plugin"))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise RuntimeError(f"the process of the side {self.side!r} ended. The end of {self._log}:\n{end}")
        return json.loads(line)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # `answer` says what happened to the process
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def run(self, load: Load, seed: int, trace: bool) -> dict[str, Any]:
        return self.ask({"load": load.fields(), "seed": seed, "trace": trace})

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def started(arguments: Sequence[str], logs: Path) -> Iterator[list[Side]]:
    """Start both processes, one after the other: each measures how much memory is free."""
    sides: list[Side] = []
    try:
        for side in SIDES:
            sides.append(Side(side, arguments, logs / f"{side}.log"))
            sides[-1].answer()
        yield sides
    finally:
        for side in sides:
            side.close()


def run_on_both(sides: Sequence[Side], load: Load, rounds: int, trace: bool) -> dict[str, Any]:
    """Run a load on both sides in turns, once to warm up and then `rounds` times, each round in the other order.

    Return {side: medians of its figures}, and with `trace` also `kernels` of a further run.
    """
    figures: dict[str, list[dict[str, float]]] = {side.side: [] for side in sides}
    for round_number in range(rounds + 1):
        for side in sides if round_number % 2 else reversed(sides):
            answer = side.run(load, round_number, False)
            if round_number:
                figures[side.side].append(answer["figures"])
    found = {side: _medians(runs) for side, runs in figures.items()}
    if trace:
        found["kernels"] = {side.side: side.run(load, rounds + 1, True)["kernels"] for side in sides}
    return found


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
