"""Run the GPU tests and benchmarks of some ops, or of all, and write the receipt.

usage: python -m tests.gpu.run [OP...]
"""

import concurrent.futures
import datetime
import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dsa.source_digest import modules_used_by
from dsa_bench.harness import case
from tests.gpu import receipt

SHARDS = 8


class _Outcome:
    """A pytest plugin that counts the tests and keeps the worst recorded error."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.tests = self.failed = 0
        self.worst = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.ids = [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += report.failed
        if report.when == "call":
            self.tests += 1
            self.worst = max([self.worst, *(value for key, value in report.user_properties if key == "error")])


def compile_all(names: list[str]) -> None:
    """Compile what the ops' kernels ship into the cache, in parallel: one after the other they take minutes."""
    # A model needs few of all ops' variants: these compile when it asks for them.
    ops = [receipt.op_module(name) for name in names if name != receipt.GENERATION]
    modules = {m for op in ops for m in modules_used_by(op) if m.startswith("dsa.kernels.")}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        work = [
            pool.submit(_compile, compile_function, arguments)
            for module in sorted(modules)
            for compile_function, arguments in importlib.import_module(module).shipped_variants()
        ]
        for future in work:
            future.result()


def _compile(compile_function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    compile_function(*arguments)  # its result, a loaded kernel, does not travel between processes


def _test(*arguments: str) -> tuple[int, _Outcome]:
    outcome = _Outcome()
    return pytest.main(["-q", "-x", "--tb=short", *arguments], plugins=[outcome]), outcome


def _run_tests(name: str) -> _Outcome:
    """An op's tests, in several processes: most of their time is the host's."""
    path = str(receipt.HERE / f"test_{name}.py")
    ids = _test("--collect-only", path)[1].ids
    context = multiprocessing.get_context("spawn")
    total = _Outcome()
    with concurrent.futures.ProcessPoolExecutor(SHARDS, mp_context=context) as pool:
        shards = [ids[i::SHARDS] for i in range(SHARDS)]
        for future in [pool.submit(_test, *shard) for shard in shards if shard]:
            code, outcome = future.result()
            if code != 0 and not outcome.failed:
                raise RuntimeError(f"{name}: pytest stopped with {code!r}")
            total.tests += outcome.tests
            total.failed += outcome.failed
            total.worst = max(total.worst, outcome.worst)
    return total


def run_op(name: str) -> dict:
    outcome = _run_tests(name)
    rows = case.run(name) if not outcome.failed and name in case.benchmarked_ops() else []
    return {
        "digest": receipt.digest(name),
        "tests": outcome.tests,
        "failed": outcome.failed,
        "worst_error": outcome.worst,
        "unverified": None,
        "bench": rows,
    }


def main(names: list[str]) -> int:
    import cutlass
    import torch

    from dsa import backends
    from dsa_bench.harness.table import print_table

    if reason := backends.why_no_kernels():
        print(f"the GPU tests need a Hopper GPU: {reason}", file=sys.stderr)
        return 2
    if unknown := set(names) - set(receipt.tested_ops()):
        print(f"no GPU tests for {', '.join(sorted(unknown))}; there are {receipt.tested_ops()}", file=sys.stderr)
        return 2
    data = receipt.load()
    data |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dsl": cutlass.__version__,
        "date": datetime.date.today().isoformat(),
    }
    compile_all(names or receipt.tested_ops())
    for name in names or receipt.tested_ops():
        data["ops"] = dict(sorted((data["ops"] | {name: run_op(name)}).items()))
        receipt.PATH.write_text(json.dumps(data, indent=1) + "\n")  # now: what comes after may fail
        print_table(name, data["ops"][name]["bench"])
    failed = [name for name, op in data["ops"].items() if op["failed"]]
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
