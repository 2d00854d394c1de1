"""Run the GPU tests and benchmarks of entries of the receipt (tests/gpu/receipt.py), and write the results into it.

usage: python -m tests.gpu.run [--commit COMMIT] [--no-bench] [--continue] [ENTRY...]

Without ENTRY, the command runs all entries that a complete receipt has for the GPU's arch. COMMIT is the commit of this
tree; it can be omitted if git knows it. `several_gpus` and `parallel` need two GPUs and are skipped with one GPU.
`hostile_contents` runs under compute-sanitizer. `oldest_dsl` is skipped unless DSA_OLDEST_DSL names a folder with that
DSL:
pip install --target FOLDER "nvidia-cutlass-dsl[cu13]==4.8.0" apache-tvm-ffi==0.1.11
`vllm_engine` and `sglang_engine` are skipped where the engine is not installed.
`accuracy` is skipped unless DSA_TRAINED_MODEL names a checkpoint, trained as `dsa_bench.e2e.accuracy` describes.

Results are written as soon as they are available. After an interrupted run, some entries have the results of their
tests but no benchmark, or only some rows of the benchmark; they are marked unverified. `--continue` resumes such an
entry if nothing that it records has changed, except the commit and the date: the GPUs, the versions of torch, the DSL
and the peers, the digest of the kernels' machine code, and that of the launches of the op's cases (receipt.py).
Otherwise the entry starts again.
"""

import argparse
import concurrent.futures
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dsa_bench.e2e import command, parallel, report
from dsa_bench.engines.rows import rows as engine_rows
from dsa_bench.harness import case, host
from dsa_layers import SHIPPED_MODEL
from tests.gpu import receipt
from tests.kernels import machine_code

SHARDS = 8
TRAINED_MODEL = "DSA_TRAINED_MODEL"
# These environment variables would change which code is tested, or the number of tests and cases.
UNSET = ("DSA_BACKEND", "DSA_FUZZ_SEED", "DSA_FUZZ_CASES", "DSA_FUZZ_CASE", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
COMMIT = r"[0-9a-f]{12,40}(-changed)?"
BEGUN = "its benchmark has not run to its end"  # the entry's "unverified" text until its benchmark is complete
# The distributions of the peers (other libraries' kernels). Rows measured with different versions are not comparable.
# cuBLASLt and torch's attention are parts of torch.
PEERS = (
    "nvidia-cudnn-frontend",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "tile-kernels",
    "tilelang",
    "tokenspeed-kernel",
    "vllm",
)
NO_MEMORY = "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "no room for the model and a cache"
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "99")


@dataclass
class Outcome:
    tests: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    worst: float = 0.0

    def add(self, test: ElementTree.Element) -> None:
        if test.find("skipped") is not None:
            self.skipped += 1
            return
        self.tests += 1
        if _failed([test]):
            self.failed.append(test.get("name"))
        errors = [float(p.get("value")) for p in test.iter("property") if p.get("name") == "error"]
        self.worst = max([self.worst, *errors])


def _failed(tests: list[ElementTree.Element]) -> list[ElementTree.Element]:
    return [test for test in tests if test.find("failure") is not None or test.find("error") is not None]


def _had_no_memory(test: ElementTree.Element) -> bool:
    """The GPU can lack free memory in pytest's process or in a process that the test started."""
    said = (f"{part.get('message')} {part.text}" for kind in ("failure", "error") for part in test.iter(kind))
    return any(words in text for text in said for words in NO_MEMORY)


def compile_all(names: list[str], arch: str) -> None:
    """Compile the entries' kernels in parallel processes. One after another they would take minutes."""
    # An entry of WHOLES needs few variants of each op. These compile on first use.
    modules = {m for name in names if name not in receipt.WHOLES for m in receipt.kernels_of(name, arch)}
    variants = (variant for family in machine_code.families() for variant in machine_code.shipped(family).values())
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        work = [
            pool.submit(_compile, compile_function, arguments)
            for compile_function, arguments in variants
            if compile_function.__module__.rpartition(".")[2] in modules
        ]
        for future in work:
            future.result()


def _compile(compile_function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    compile_function(*arguments)  # the result, a loaded kernel, cannot be sent to another process


def run_tests(names: Sequence[str]) -> dict[str, Outcome]:
    """Run the tests in several processes, because they spend most time on the host. Return {entry: outcome}."""
    outcomes = {name: Outcome() for name in names}
    for marks, prefix, environment, group in _groups(names):
        owners = {receipt.module_of(path): name for name in group for path in receipt.test_files(name)}
        if owners:
            paths = [str(receipt.ROOT / f"{module.replace('.', '/')}.py") for module in owners]
            _run_group(["-m", marks], prefix, os.environ | environment, paths, owners, outcomes)
    return outcomes


def _groups(names: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...], dict[str, str], list[str]]]:
    """Yield (marks of the tests, command before pytest, environment, entries that can run together)."""
    apart = {
        "hostile_contents": ("not several_gpus", MEMCHECK, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        "oldest_dsl": ("not several_gpus", (), oldest_dsl()),
        "parallel": ("several_gpus", (), {}),
        "several_gpus": ("several_gpus", (), {}),
    }
    yield "not several_gpus", (), {}, [name for name in names if name not in apart]
    for name in sorted(apart.keys() & {*names}):
        yield *apart[name], [name]


def oldest_dsl() -> dict[str, str]:
    """Return the environment variables with which Python finds the oldest supported DSL, or {}."""
    folder = os.environ.get("DSA_OLDEST_DSL")
    if not folder:
        return {}
    found = [folder, str(Path(folder, "nvidia_cutlass_dsl", "dsl_packages")), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def dsl_version(environment: dict[str, str]) -> str:
    """Return the version of the DSL that a process imports, or the last line of the process's error."""
    call = [sys.executable, "-c", "import cutlass; print(cutlass.__version__)"]
    done = subprocess.run(call, env=os.environ | environment, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().rpartition("\n")[2]


def _run_group(
    marks: list[str],
    prefix: tuple[str, ...],
    environment: dict[str, str],
    paths: list[str],
    owners: dict[str, str],
    outcomes: dict[str, Outcome],
) -> None:
    def owner(name: str) -> str:
        return next(entry for module, entry in owners.items() if name.startswith(f"{module}."))

    ids = _collected([*marks, *paths])
    with tempfile.TemporaryDirectory() as directory, concurrent.futures.ThreadPoolExecutor(SHARDS) as pool:

        def run_in_a_process(name: str, own: list[str]) -> list[ElementTree.Element]:
            report = Path(directory, f"{name}.xml")
            command = [*prefix, sys.executable, "-m", "pytest", "-q", "--tb=short", "--maxfail=10"]
            # Only the end of the output is printed. It should show failures, not warnings.
            command += ["--disable-warnings", *marks]
            listed = Path(directory, f"{name}.txt")  # the ids would be too long for a command line
            listed.write_text("\n".join(own))
            done = subprocess.run(
                [*command, f"--junitxml={report}", f"@{listed}"], env=environment, capture_output=True, text=True
            )
            # A killed process leaves no report, so its tests count as not run.
            tests = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
            lacking = [test for test in tests if _had_no_memory(test)]
            if done.returncode:
                print(f"pytest gave {done.returncode}\n{(done.stdout + done.stderr)[-6000:]}", flush=True)
            if prefix and done.returncode and not (done.returncode == 1 and lacking == _failed(tests)):
                outcomes["hostile_contents"].failed.append("compute-sanitizer or a test found errors")
            elif done.returncode not in (0, 1):  # 1: a test failed, which is in the report
                for entry in {owner(_reported(test)) for test in own}:
                    outcomes[entry].failed.append(f"pytest ended with {done.returncode}")
            return tests

        shards = min(SHARDS, len(ids))
        tests = [
            test
            for tests in pool.map(lambda i: run_in_a_process(str(i), ids[i::shards]), range(shards))
            for test in tests
        ]
        # A test can lack GPU memory because other processes' tests use it.
        lacking = [test for test in tests if shards > 1 and _had_no_memory(test)]
        if lacking:
            print(f"once more, by themselves: {len(lacking)} tests that found no memory", flush=True)
            names = {_name(test) for test in lacking}
            again = run_in_a_process("again", [test for test in ids if _reported(test) in names])
            tests = [test for test in tests if test not in lacking] + again
        for test in tests:
            outcomes[owner(_name(test))].add(test)
    # A test that kills its process or corrupts the GPU's context prevents other tests from running.
    for name, count in Counter(owner(_reported(test)) for test in ids).items():
        if missing := count - outcomes[name].tests - outcomes[name].skipped:
            outcomes[name].failed.append(f"{missing} tests did not run")
        elif not outcomes[name].tests:
            outcomes[name].failed.append(f"all of its {count} tests were skipped")


def _name(test: ElementTree.Element) -> str:
    return f"{test.get('classname')}.{test.get('name')}"


def _reported(test: str) -> str:
    path, _, names = test.partition("::")
    place, bracket, parameters = names.partition("[")
    return f"{path.removesuffix('.py').replace('/', '.')}.{place.replace('::', '.')}{bracket}{parameters}"


def _collected(arguments: list[str]) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "--collect-only",
        "-q",
        "--disable-warnings",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise RuntimeError(f"pytest could not collect {arguments}:\n{done.stdout}{done.stderr}")
    return ids


def rows_of(name: str, done: Sequence[dict]) -> Iterator[dict]:
    """Yield the rows of an entry's benchmark. Entries of `receipt.ROW_BY_ROW` skip the shapes in `done`."""
    shapes = [row["shape"] for row in done]
    if name in case.benchmarks():
        yield from case.run(name)
    elif name == "host":
        yield from host.rows()
    elif name == "e2e":
        yield from report.rows(done=shapes)
    elif name == "parallel":
        yield from parallel.all_rows(done=shapes)
    elif name in receipt.ENGINES:
        yield from engine_rows(receipt.ENGINES[name], done=shapes)
    elif name == "accuracy":
        yield from command.compiled_rows(name, checkpoints=[SHIPPED_MODEL, Path(os.environ[TRAINED_MODEL])])
    elif name in command.NAMES:
        yield from command.compiled_rows(name, **({"done": shapes} if name in receipt.ROW_BY_ROW else {}))


def peer_versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_entry(
    name: str,
    outcome: Outcome,
    bench: bool,
    done: Sequence[dict] = (),
    keep: Callable[[list[dict]], None] = lambda rows: None,
) -> dict[str, Any]:
    """Run an entry's benchmark unless a test failed. Return the entry without device, versions and digests.

    done  rows that an earlier run has measured
    keep  called with all rows so far after every new row
    """
    started, rows = time.monotonic(), [*done]
    try:
        for row in rows_of(name, done) if bench and not outcome.failed else ():
            rows.append(row)
            keep(rows)
    except Exception as error:  # continue, because the tests of later entries are already done
        traceback.print_exc()
        rows = []
        outcome.failed.append(f"its benchmark: {type(error).__name__}: {error}")
    for failed in outcome.failed:
        print(f"{name}: FAILED {failed}")
    return {
        "tests": outcome.tests,
        "skipped": outcome.skipped,
        "failed": len(outcome.failed),
        "worst_error": outcome.worst,
        "bench_seconds": round(time.monotonic() - started, 1),
        "unverified": None,
        "bench": rows,
    }


def begun(entry: dict[str, Any], head: dict[str, Any]) -> Outcome | None:
    """Return the test results of an interrupted entry if its device, versions and digests are those of `head`."""
    same = all(entry.get(key) == value for key, value in head.items() if key not in ("commit", "date"))
    if entry.get("unverified") != BEGUN or not same:
        return None
    return Outcome(entry["tests"], entry["skipped"], [], entry["worst_error"])


def _pending(outcome: Outcome, rows: list[dict]) -> dict[str, Any]:
    return {
        "tests": outcome.tests,
        "skipped": outcome.skipped,
        "failed": len(outcome.failed),
        "worst_error": outcome.worst,
        "unverified": BEGUN,
        "bench": rows,
    }


def _keeper(arch: str, name: str, entry: dict[str, Any]) -> Callable[[list[dict]], None]:
    return lambda rows: save_entry(arch, name, entry | {"bench": rows})


def save_entry(arch: str, name: str, entry: dict[str, Any]) -> None:
    with receipt.changing() as data:
        data.setdefault(arch, {})[name] = entry


def commit_of_this_tree() -> str | None:
    """Return the first 12 digits of git's HEAD, with "-changed" if files differ. None without git or outside a
    repository."""
    try:
        git = ["git", "-C", str(receipt.ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-changed" if changed.stdout.strip() else "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__.splitlines()[0])
    parser.add_argument("entries", nargs="*", metavar="ENTRY")
    parser.add_argument("--commit", default=commit_of_this_tree(), help="default: what git says")
    parser.add_argument("--no-bench", action="store_true", help="tests alone: keeps no figures")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="go on where a run was cut off")
    args = parser.parse_args(arguments)

    for name in UNSET:
        os.environ.pop(name, None)
    import cutlass
    import torch

    from dsa.runtime import backends
    from dsa_bench.harness.table import print_table

    if reason := backends.why_no_kernels():
        parser.error(f"the GPU tests need a GPU with kernels: {reason}")
    if not args.commit:
        parser.error("--commit: git does not tell the commit here; give it")
    if not re.fullmatch(COMMIT, args.commit):
        parser.error(f"--commit: must be at least 12 digits of its hash, got {args.commit!r}")
    if unknown := set(args.entries) - set(receipt.tested()):
        parser.error(f"no GPU tests for {', '.join(sorted(unknown))}; there are {', '.join(receipt.tested())}")
    arch = backends.arch_of(torch.device("cuda", torch.cuda.current_device()))
    one_gpu = torch.cuda.device_count() < 2
    cannot = {"several_gpus": one_gpu, "parallel": one_gpu, "oldest_dsl": not oldest_dsl()}
    cannot |= {name: importlib.util.find_spec(engine) is None for name, engine in receipt.ENGINES.items()}
    cannot["accuracy"] = TRAINED_MODEL not in os.environ
    names = args.entries or [name for name in receipt.asked(arch) if not cannot.get(name)]
    if "oldest_dsl" in names and (found := dsl_version(oldest_dsl())) != receipt.OLDEST_DSL:
        parser.error(f"oldest_dsl: DSA_OLDEST_DSL must name a folder with CuTe DSL {receipt.OLDEST_DSL}, got {found}")
    if "accuracy" in names and TRAINED_MODEL not in os.environ:
        parser.error(f"accuracy: {TRAINED_MODEL} must name a checkpoint")
    if "hostile_contents" in names and not shutil.which(MEMCHECK[0]):
        parser.error(f"hostile_contents runs under {MEMCHECK[0]}, which is not on the PATH")
    place = {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "torch": torch.__version__,
        "dsl": cutlass.__version__,
        "peers": peer_versions(),
    }
    places = {name: place | ({"dsl": receipt.OLDEST_DSL} if name == "oldest_dsl" else {}) for name in names}
    head = {"date": receipt.now().date().isoformat(), "commit": args.commit}
    heads = {name: head | places[name] | receipt.digests(name, arch) for name in names}
    earlier = receipt.load().get(arch, {}) if args.go_on else {}
    outcomes = {name: begun(earlier.get(name, {}), heads[name]) for name in names}
    done = {name: earlier[name]["bench"] for name, outcome in outcomes.items() if outcome is not None}
    fresh = [name for name in names if name not in done]
    compile_all(names, arch)
    outcomes |= run_tests(fresh) if fresh else {}
    pending = {name: _pending(outcomes[name], done.get(name, [])) for name in names}
    for name in fresh:
        if not outcomes[name].failed:
            save_entry(arch, name, heads[name] | pending[name])
    failed = []
    for name in names:
        row_by_row = name in receipt.ROW_BY_ROW
        keep = _keeper(arch, name, heads[name] | pending[name]) if row_by_row else lambda rows: None
        rows = done.get(name, ())
        entry = heads[name] | run_entry(name, outcomes[name], not args.no_bench, rows, keep)
        save_entry(arch, name, entry)
        print(
            f"{name}: {entry['tests']} tests, {entry['failed']} failed, benchmark {entry['bench_seconds']} s",
            flush=True,
        )
        if name in case.benchmarks():
            print_table(name, entry["bench"])
        if entry["failed"]:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
