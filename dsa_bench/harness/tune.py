"""Search an op's tile configurations on this machine's GPU, and write the winners as the data that the op loads."""

import concurrent.futures
import datetime
import importlib
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dsa.ops import op_module
from dsa.runtime import backends
from dsa.runtime.op import OPS, forget_calls
from dsa.testing import bench
from dsa_bench.harness.case import Call, Case, load

WORTH = 1.01  # a winner is written if the modelled choice takes more than WORTH times as long (`_winner`)


@dataclass(frozen=True)
class TuningClass:
    """A class of shapes that share a configuration.

    tries     configuration -> whether it is worth a trial
    shapes    {a shape of the benchmark: the compile function's arguments except the last, which is the configuration}
    modelled  the configuration that the op chooses without data, or None if the op must have data for every class
    """

    tries: Callable[[Any], bool]
    shapes: dict[tuple[Any, ...], tuple[Any, ...]]
    modelled: Any = None


@dataclass(frozen=True)
class Tuning:
    """An op's search space. candidates: {configuration: the function that compiles it}. classes: {name: class of
    shapes}."""

    candidates: dict[Any, Callable[..., Any]]
    classes: dict[str, TuningClass]


@dataclass(frozen=True)
class Trial:
    """The outcome of a configuration on a class of shapes. registers: per thread, as text. ms: a time per shape.
    figure: the first shape's rate as text. failure: why there are no times; "" if there are."""

    config: Any
    registers: str
    ms: tuple[float, ...] = ()
    figure: str = ""
    failure: str = ""

    @property
    def score(self) -> float:
        return math.prod(self.ms) if self.ms else math.inf


def tune(op: str, output: Path | None = None, jobs: int | None = None) -> None:
    """Compile, in parallel processes, the configurations that the classes of `op` try, for the current GPU's arch. Time
    those that are correct, and print them by class. Write the winners to `output`, by default the package's data."""
    from dsa.cute import tuning

    module = load(op)
    gpu = torch.device("cuda", torch.cuda.current_device())
    arch, there = backends.arch_of(gpu), OPS[op].launches
    if arch not in there:
        raise ValueError(f"{op}: has no {arch} kernel, only those for {', '.join(there)}")
    plan: Tuning = module.tuning()
    candidates = {name: [c for c in plan.candidates if shapes.tries(c)] for name, shapes in plan.classes.items()}
    # A dict, so that a kernel that several classes try is compiled once.
    todo = {
        (*arguments, config): plan.candidates[config]
        for name, shapes in plan.classes.items()
        for config in candidates[name]
        for arguments in shapes.shapes.values()
    }
    jobs = jobs or len(os.sched_getaffinity(0))
    print(f"{op}: compiling {len(todo)} kernels in {jobs} processes")
    # Use processes, because the DSL compiles in one thread. Spawn them, because CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        compiled = dict(zip(todo, pool.map(_compile, todo.values(), todo)))

    path = output or tuning.path_of(op, arch)
    path.parent.mkdir(parents=True, exist_ok=True)  # an arch without data has no folder
    note = {
        "device": torch.cuda.get_device_name(),
        "multiprocessors": backends.num_sms(gpu),
        "date": datetime.date.today().isoformat(),
    }
    for name, shapes in plan.classes.items():
        cases = [module.case(*shape) for shape in shapes.shapes]
        registers = {
            c: max((compiled[*arguments, c] for arguments in shapes.shapes.values()), key=_worse)
            for c in candidates[name]
        }
        trials = _try_all(op, arch, name, registers, cases)
        trials.sort(key=lambda trial: trial.score)
        print_trials(name, [case.name for case in cases], trials)
        if not trials or not trials[0].ms:
            raise RuntimeError(f"{op}: no configuration of class {name!r} is correct")
        # A search takes minutes. So write after each class, to keep the results if the search is interrupted.
        tuning.write(op, {name: _winner(shapes, trials)}, note, path)
    print(f"wrote {path}")


def _winner(shapes: TuningClass, trials: Sequence[Trial]) -> Any:
    """Return the fastest configuration, or None if the op needs no data. That is so if the modelled choice takes at
    most WORTH times as long, in the geometric mean over the shapes. trials: the fastest first."""
    modelled = next((trial for trial in trials if trial.config == shapes.modelled and trial.ms), None)
    within = modelled is not None and modelled.score <= WORTH ** len(modelled.ms) * trials[0].score
    return None if within else trials[0].config


def _compile(compile_function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Compile a kernel into the compile cache. Return the registers per thread, "-" if they are unknown, or "fails: "
    and the last line of the error."""
    from dsa.runtime.compile_cache import cubin
    from dsa.runtime.sass import disassemble

    try:
        compile_function(*arguments)
        return str(disassemble(cubin(compile_function, *arguments)).registers)
    except FileNotFoundError:  # without a disassembler the registers are unknown
        return "-"
    except Exception as error:  # a candidate's error must not end the search
        return f"fails: {str(error).strip().splitlines()[-1][:80]}"


def _worse(outcome: str) -> tuple[bool, int, str]:
    """Return a sort key for texts of `_compile`. A larger number of registers is worse, and a failure is worst."""
    return outcome.startswith("fails"), len(outcome), outcome


def _try_all(op: str, arch: str, shape_class: str, registers: dict[Any, str], cases: Sequence[Case]) -> list[Trial]:
    """Check every compiled configuration on every case. Then time the correct ones in turns, so that clocks and heat
    affect all in the same way. registers: {configuration: the text of `_compile`}."""
    failures = {config: outcome for config, outcome in registers.items() if outcome.startswith("fails")}
    # Per case, the results that passed its check. A result that equals one of them skips the check, which runs the
    # reference and takes much longer.
    correct_results: list[list[torch.Tensor]] = [[] for _ in cases]
    for config in registers.keys() - failures.keys():
        try:
            for case, known in zip(cases, correct_results):
                result = _under(op, arch, shape_class, config, case.calls["dsa"][0])()
                if not any(torch.equal(result, other) for other in known):
                    case.check(result)
                    known.append(result)
        except AssertionError as error:
            failures[config] = f"wrong: {error}"
    correct = [config for config in registers if config not in failures]
    times = []
    for case in cases:
        calls = {
            config: [_under(op, arch, shape_class, config, call) for call in case.calls["dsa"]] for config in correct
        }
        times.append(bench(calls, repeats=case.repeats, graph=case.graph))
    found = {config: tuple(ms[config] for ms in times) for config in correct}
    return [Trial(config, registers[config], ms, cases[0].figure(ms[0])) for config, ms in found.items()] + [
        Trial(config, "-", failure=failure) for config, failure in failures.items()
    ]


def _under(op: str, arch: str, shape_class: str, config: Any, call: Call) -> Call:
    """Return a function that runs `call` with this configuration. Before and after the call, it clears the op's caches
    of chosen configurations, which ignore the trial."""
    from dsa.cute import tuning

    caches = [x for x in vars(importlib.import_module(op_module(op))).values() if hasattr(x, "cache_clear")]

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()
        forget_calls()

    def run() -> object:
        with tuning.trial(op, arch, shape_class, config):
            forget()
            try:
                return call()
            finally:
                forget()

    return run


def print_trials(name: str, shapes: Sequence[str], trials: Sequence[Trial]) -> None:
    print(f"\n{name}: ms at " + "; ".join(shapes))
    for trial in trials:
        fields = " ".join(f"{name} {value:<3}" for name, value in asdict(trial.config).items())
        times = "  ".join(f"{ms:9.4f}" for ms in trial.ms)
        print(f"  {fields}   {trial.registers:>3} registers  {times}  {trial.figure}{trial.failure}")
