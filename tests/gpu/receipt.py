"""The GPU receipt (receipt.json): what was tested and measured on each GPU arch, and the results. This module reads and
writes the receipt, and decides whether the entries are still valid.

The op of `dsa/ops/FAMILY/NAME.py` has the entry NAME. The entry's tests are `tests/gpu/FAMILY/test_NAME.py` and its
benchmark is `dsa_bench/FAMILY/NAME.py`. If NAME is an op's name with more words after it, the entry is about a part of
the op. Entries of WHOLES are about more than one op.

An entry contains the commit, date, device and versions of a run, the tests' results, the benchmark's rows, and two
digests:
- "kernels": a digest of the machine code of every variant of the kernels that the entry runs
  (`tests.kernels.machine_code`).
- "launches": a digest of the launches in the op's cases (`tests.ops.launched_arguments`): the variants, the shapes,
  strides and dtypes of their arguments, and which arguments are zeros or share memory. Entries of WHOLES do not contain
  it.
The machine code is that of the DSL version that machine_code.json names. An entry is stale if today's code has other
digests. An entry of WHOLES is also stale if it is older than MAX_AGE. Moving, renaming or rewording source changes
neither digest.
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa import ops
from dsa.ops import op_modules
from dsa.runtime.backends import ARCHS
from dsa_bench.harness.benchmarks import benchmarks
from tests.kernels import machine_code
from tests.ops import launched_arguments
from tests.public_names import ops_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PATH = HERE / "receipt.json"
MAX_AGE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Whole:
    """An entry about more than one op.

    label     the entry's name in tables
    families  families of the ops that the entry launches
    sources   Python files or folders of this project: the entry launches the ops that they name
    """

    label: str
    families: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


EVERY_FAMILY = tuple(sorted({module.split(".")[2] for module in op_modules().values()}))
INFERENCE = tuple(family for family in EVERY_FAMILY if family != "training")
SEVERAL_GPUS = "pytest.mark.several_gpus"
OLDEST_DSL = "4.8.0"  # the version that vLLM and SGLang pin
# The ops that dominate the time of a model's pass. Their tests run a second time for the entry oldest_dsl.
HOT = (
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_sparse",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "topk_indices",
)
WHOLES = {
    "accuracy": Whole("accuracy of passes with trained weights: `python -m dsa_bench.e2e accuracy`", INFERENCE),
    "against_transformers": Whole(
        "transformers' layers with and without dsa: `python -m dsa_bench.e2e against_transformers`", INFERENCE
    ),
    "drafts": Whole("decoding with drafts: `python -m dsa_bench.e2e drafts`", INFERENCE),
    "e2e": Whole("whole passes: `dsa bench e2e`", INFERENCE),
    "every_case": Whole("all ops: right, repeatable, in graphs, on streams, compiled: `dsa.cases`", EVERY_FAMILY),
    "fuzz": Whole("all ops: mutated calls", EVERY_FAMILY),
    "generation": Whole("generation: `dsa_layers.Generator`", INFERENCE),
    "host": Whole("a call's time on the host: `dsa bench host`", EVERY_FAMILY),
    "hostile_contents": Whole("all ops: hostile index contents under compute-sanitizer", EVERY_FAMILY),
    "latency": Whole("a long prompt among sequences that decode: `python -m dsa_bench.e2e latency`", INFERENCE),
    "million": Whole("contexts of a million tokens: `python -m dsa_bench.e2e million`", INFERENCE),
    "oldest_dsl": Whole("hot ops on the oldest CuTe DSL that is supported"),
    "parallel": Whole("models over two GPUs: `python -m dsa_bench.e2e parallel`", (*INFERENCE, "parallel")),
    "recorded_calls": Whole("all ops: calls whose steps are recorded", EVERY_FAMILY),
    "several_gpus": Whole("ops on a GPU that is not the current one", EVERY_FAMILY),
    "sglang_engine": Whole(
        "SGLang with and without the plugin: `python -m dsa_bench.engines sglang`",
        sources=("dsa_engines/sglang", "dsa_engines"),
    ),
    "sglang_adapters": Whole(
        "SGLang's plugin: its calls compared with the kernels that SGLang calls", sources=("dsa_engines/sglang",)
    ),
    "training_example": Whole("the training example: `examples/train_indexer.py`", EVERY_FAMILY),
    "transformers": Whole("transformers' models: `dsa_layers.hf`", EVERY_FAMILY),
    "user_commands": Whole(
        "the user's commands: `dsa check`, `dsa generate`, every Python block of the documents", EVERY_FAMILY
    ),
    "vllm_engine": Whole(
        "vLLM with and without the plugin: `python -m dsa_bench.engines vllm`",
        sources=("dsa_engines/vllm", "dsa_engines"),
    ),
    "vllm_adapters": Whole(
        "vLLM's plugin: its calls compared with the kernels that vLLM calls", sources=("dsa_engines/vllm",)
    ),
}
# These benchmarks take minutes. Each row is saved as soon as it is measured.
ENGINES = {"vllm_engine": "vllm", "sglang_engine": "sglang"}  # entries that need an engine, and its package
ROW_BY_ROW = ("drafts", "e2e", "million", "parallel", *ENGINES)

Entry = dict[str, Any]
Entries = dict[str, dict[str, Entry]]


def load() -> Entries:
    """Return {arch: {entry's name: entry}}. entry["unverified"] is None, or says which part of the entry's run is
    missing."""
    return read(PATH) if PATH.exists() else {}


def read(path: Path) -> Entries:
    """Return the entries of a receipt's file. Raise ValueError if it is not a receipt."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a receipt, got: {error}") from None
    entries = [*data.values()] if isinstance(data, dict) else [data]
    if not all(isinstance(of, dict) and all(isinstance(entry, dict) for entry in of.values()) for of in entries):
        raise ValueError(f"{path} must be a receipt, got: no {{arch: {{entry's name: entry}}}}")
    return data


def save(data: Entries) -> None:
    """If the process is killed, the file has the old or the new contents."""
    text = json.dumps({arch: dict(sorted(data[arch].items())) for arch in sorted(data)}, indent=1) + "\n"
    partial = PATH.with_suffix(f".{os.getpid()}.part")
    partial.write_text(text)
    os.replace(partial, PATH)


@contextlib.contextmanager
def changing() -> Iterator[Entries]:
    """Yield the entries, and save them at the end unless the block raises. Other processes that call `changing`
    wait."""
    handle = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        data = load()
        yield data
        save(data)
    finally:
        os.close(handle)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def judged(today: datetime.date | None = None) -> Entries:
    """Return the entries like `load`, but "unverified" also says why an entry is stale. Without `today`, age is
    ignored."""
    data = load()
    return {
        arch: {name: entry | {"unverified": why_stale(entry, name, arch, today)} for name, entry in entries.items()}
        for arch, entries in data.items()
    }


def why_stale(entry: Entry, name: str, arch: str, today: datetime.date | None = None) -> str | None:
    """Return why an entry is incomplete or not valid for today's code, or None. Without `today`, age is ignored."""
    if entry.get("unverified"):
        return entry["unverified"]
    if "kernels" not in entry or (name not in WHOLES and "launches" not in entry):
        return "it does not say on which kernels it ran"
    if entry["kernels"] != kernels_digest(name, arch):
        return "the machine code of its kernels has changed"
    if name not in WHOLES and entry["launches"] != launches_digest(name, arch):
        return "its launches have changed"
    if name in WHOLES and today and today - datetime.date.fromisoformat(entry["date"]) > MAX_AGE:
        return f"it ran more than {MAX_AGE.days} days ago"
    return None


def digests(name: str, arch: str) -> dict[str, str]:
    found = {"kernels": kernels_digest(name, arch)}
    return found if name in WHOLES else found | {"launches": launches_digest(name, arch)}


def kernels_digest(name: str, arch: str) -> str:
    """Return a digest of the machine code and the compile-time arguments of an entry's kernels, without names."""
    modules = kernels_of(name, arch)
    own = {variant: code for variant, code in _machine_code().items() if variant.partition(".")[0] in modules}
    return _digest(sorted([machine_code.without_names(variant), code] for variant, code in own.items()))


def kernels_of(name: str, arch: str) -> set[str]:
    """Return the names of the kernel modules that an entry's functions launch in `dsa.cases`. Only
    launched_arguments.ARCH has any."""
    found = {
        variant.partition(".")[0]
        for function in functions_of(name)
        for call in _launches(function, arch)
        for variant, _ in call
    }
    if name in WHOLES and "parallel" in WHOLES[name].families:  # the kernels of dsa/kernels/parallel belong to no op
        found |= {variant.partition(".")[0] for variant in machine_code.shipped("parallel")}
    return found


def launches_digest(name: str, arch: str) -> str:
    """Return a digest of the launches, without names and without the order of cases."""
    codes = _machine_code()
    calls = [
        [[codes.get(variant) or machine_code.without_names(variant), arguments] for variant, arguments in call]
        for function in functions_of(name)
        for call in _launches(function, arch)
    ]
    return _digest(sorted(calls))


def _launches(function: str, arch: str) -> list[list[list[str]]]:
    if arch != launched_arguments.ARCH:
        return []
    return launched_arguments.launched()["launches"].get(function, [])


@functools.cache
def _machine_code() -> machine_code.Digests:
    return machine_code.current()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


@functools.cache
def functions_of(name: str) -> list[str]:
    if name == "oldest_dsl":
        modules = {op_module(path.stem.removeprefix("test_")) for path in test_files(name)}
    elif name not in WHOLES:
        modules = {op_module(name)}
    else:
        modules = {m for m in op_modules().values() if m.split(".")[2] in WHOLES[name].families}
    found = {function for module in modules for function in ops_of(module)}
    for source in WHOLES[name].sources if name in WHOLES else ():
        words = {word for path in (ROOT / source).rglob("*.py") for word in re.findall(r"\w+", path.read_text())}
        found |= words & ARCHS.keys()
    return sorted(found)


def op_module(name: str) -> str:
    """Return the module of the op whose name begins the entry's name. Of several ops it is the one with the longest
    name."""
    modules = op_modules()
    found = [op for op in modules if f"{name}_".startswith(f"{op}_")]
    return modules[max(found, key=len)] if found else ops.op_module(name)


def test_files(name: str) -> list[Path]:
    """Return the files with the entry's tests; [] if the entry has only a benchmark."""
    if name == "several_gpus":
        paths = {*HERE.rglob("test_*.py")} - {*test_files("parallel")}
        return [path for path in sorted(paths) if SEVERAL_GPUS in path.read_text()]
    if name == "oldest_dsl":
        return [path for op in HOT for path in test_files(op)]
    return list(HERE.rglob(f"test_{name}.py"))


def tested() -> list[str]:
    return sorted({path.stem.removeprefix("test_") for path in HERE.rglob("test_*.py")} | WHOLES.keys())


def asked(arch: str) -> list[str]:
    """Return the names of the entries that a complete receipt has for an arch.

    These are the entries of ops that have kernels for the arch. WHOLES are included if more than half of all ops with
    kernels have kernels for this arch. Then a model's pass runs mostly kernels.
    """
    with_kernels = archs_by_op()
    modules = [ops.op_module(op) for op, archs in with_kernels.items() if arch in archs]
    names = [name for name in tested() if name not in WHOLES and op_module(name) in modules]
    return sorted([*names, *WHOLES] if 2 * len(modules) > len(with_kernels) else names)


def archs_by_op() -> dict[str, set[str]]:
    """Return {op: its archs}, for every op with kernels."""
    rows = {op: [ARCHS.get(f, ()) for f in ops_of(module)] for op, module in op_modules().items()}
    return {op: set().union(*archs) for op, archs in rows.items() if any(archs)}


def needed(data: Entries, arch: str) -> list[str]:
    """Return the entries of an arch that must run, because they are missing, incomplete or stale."""
    there = data.get(arch, {})
    names = sorted({*asked(arch), *there} & {*tested()})
    return [name for name in names if name not in there or why_stale(there[name], name, arch, now().date())]


def has_figures(name: str) -> bool:
    return name in ("accuracy", "against_transformers", "host", "latency", *ROW_BY_ROW) or name in benchmarks()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)
