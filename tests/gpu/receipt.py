"""The GPU receipt: which code was tested on which GPU arch, by which tests, with what outcome, and how fast it was.

`tests/gpu/FAMILY/test_NAME.py` and `dsa_bench/FAMILY/NAME.py` belong to the op NAME, whose code is
`dsa/ops/FAMILY/NAME.py`; where NAME is an op's with more words behind it, to that part of the op. Entries of WHOLES are
of more than one op. An entry's digest covers
- the code: what the entry is about, with everything of this project that it imports, and the tile configurations that
  its kernels load. Of an op's kernels those for the entry's arch count: an entry is of one arch;
- of the user's commands also the commands, the documents' Python, and the model that comes with dsa;
- the judges: its test file, conftest and benchmark, with the modules of tests/, dsa_bench/ and dsa.testing that they
  import. A test that is weaker than the one that ran ends the entry, as a changed kernel does;
- what tests and benchmark take from the project besides: see `_taken`.

An entry that is unverified says why, and `unverified_at` is the digest of the code and judges of which it says that:
once these are others, the reason has to be given anew.
"""

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsa import source_digest
from dsa.backends import KERNELS
from dsa.source_digest import digest_of, modules_used_by, op_modules
from dsa_bench.harness.benchmarks import benchmarks
from tests.gpu.named_modules import modules_named_by
from tests.public_names import ops_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PATH = HERE / "receipt.json"
TUNED = ROOT / "dsa" / "tuned"
LAYERS = ROOT / "dsa_layers"
WHOLES = {
    "drafts": "decoding with drafts: `python -m dsa_bench.e2e.drafts`",
    "e2e": "whole passes: `dsa bench e2e`",
    "fuzz": "all ops: mutated calls",
    "generation": "generation: `dsa_layers.Generator`",
    "host": "a call's time on the host: `dsa bench host`",
    "hostile_contents": "all ops: hostile index contents under compute-sanitizer",
    "million": "contexts of a million tokens: `python -m dsa_bench.e2e.million`",
    "oldest_dsl": "hot ops on the oldest CuTe DSL that is supported",
    "parallel": "models over two GPUs: `python -m dsa_bench.e2e.parallel`",
    "recorded_calls": "all ops: calls whose steps are recorded",
    "several_gpus": "ops on a GPU that is not the current one",
    "sglang_adapters": "SGLang's plugin: its calls beside the kernels that SGLang calls",
    "training_example": "the training example: `examples/train_indexer.py`",
    "transformers": "transformers' models: `dsa_layers.hf`",
    "user_commands": "the user's commands: `dsa check`, `dsa generate`, every Python block of the documents",
    "vllm_adapters": "vLLM's plugin: its calls beside the kernels that vLLM calls",
}
# Those of whole passes, whose benchmarks take minutes: their rows are written as they come.
ROW_BY_ROW = ("drafts", "e2e", "million", "parallel")
SEVERAL_GPUS = "pytest.mark.several_gpus"
OLDEST_DSL = "4.8.0"  # which vLLM and SGLang pin
# The ops that take most of a pass's time: the entries whose tests run once more with the oldest DSL.
HOT = (
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_sparse",
    "fp8_gemm_nt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "topk_indices",
)
ADAPTERS = "_adapters"  # behind an engine's name: what its plugin calls the ops by
# Files and folders of dsa_layers that no pass of a model on one GPU runs: models import the ranks and rows of
# "parallel", and on one GPU run no line there but those that say that it is alone. Tests of generation and of several
# GPUs run models of those in TINY.
TINY = ("manifest.py", "tiny.py", "tiny")
NOT_RUN = ("command", "compilation", "evaluation", "export.py", "hf", "parallel", "training", "vendored", *TINY)


Entries = dict[str, dict[str, dict[str, Any]]]


def load() -> Entries:
    """{arch: {entry's name: entry}}."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def save(data: Entries) -> None:
    PATH.write_text(json.dumps({arch: dict(sorted(data[arch].items())) for arch in sorted(data)}, indent=1) + "\n")


def op_module(name: str) -> str:
    """The bridge of the op that an entry is about."""
    modules = op_modules()
    ops = [op for op in modules if f"{name}_".startswith(f"{op}_")]
    return modules[max(ops, key=len)] if ops else source_digest.op_module(name)


def test_files(name: str) -> list[Path]:
    """The files whose tests an entry runs."""
    if name == "several_gpus":
        paths = {*HERE.rglob("test_*.py")} - {*test_files("parallel")}
        return [path for path in sorted(paths) if SEVERAL_GPUS in path.read_text()]
    if name == "oldest_dsl":
        return [path for op in HOT for path in test_files(op)]
    return list(HERE.rglob(f"test_{name}.py"))


def tested() -> list[str]:
    """Every entry that there can be."""
    return sorted({path.stem.removeprefix("test_") for path in HERE.rglob("test_*.py")} | WHOLES.keys())


def asked(arch: str) -> list[str]:
    """The entries that a complete receipt has of an arch: those of the ops that have kernels for it; and the wholes,
    where most ops have them, so that a pass of a model is kernels in the main."""
    with_kernels = archs_by_op()
    modules = [source_digest.op_module(op) for op, archs in with_kernels.items() if arch in archs]
    names = [name for name in tested() if name not in WHOLES and op_module(name) in modules]
    return sorted([*names, *WHOLES] if 2 * len(modules) > len(with_kernels) else names)


def archs_by_op() -> dict[str, set[str]]:
    """{op: the archs for which one of its functions has kernels} of every op with kernels."""
    rows = {op: [KERNELS.get(f, {}) for f in ops_of(module)] for op, module in op_modules().items()}
    return {op: set().union(*archs) for op, archs in rows.items() if any(archs)}


def needed(data: Entries, arch: str, among: Iterable[str] = ()) -> list[str]:
    """The entries of an arch that have to run there, or have to say why they have not: those that are asked for and
    missing, and those of code or tests that have changed since they ran, or since they said why not. among: these
    alone, if there are any."""
    there = data.get(arch, {})
    names = sorted({*asked(arch), *there} & {*tested()} & {*(among or tested())})
    return [name for name in names if name not in there or not is_of_this_code(there[name], name, arch)]


def is_of_this_code(entry: dict[str, Any], name: str, arch: str) -> bool:
    """Whether today's code and judges are those that an entry ran with, or of which it says why it has not."""
    return entry.get("unverified_at" if entry["unverified"] else "digest") == digest(name, arch)


def has_figures(name: str) -> bool:
    """Whether an entry has rows of a benchmark."""
    return name == "host" or name in ROW_BY_ROW or name in benchmarks()


def module_of(path: Path) -> str:
    """The name of a module of this project."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def digest(name: str, arch: str) -> str:
    code, judges = code_modules(name, arch), judge_modules(name, arch)
    h = hashlib.sha256(f"{arch} {digest_of(code, arch)} {digest_of(judges, arch)}".encode())
    for data in tuned_data([*code, *judges], arch):
        found = json.loads(data.read_text())
        # Of so many multiprocessors alone, where a model is beside the data.
        h.update(json.dumps(found["winners"], sort_keys=True).encode() + str(found.get("multiprocessors", "")).encode())
    if name == "user_commands":
        h.update("\n".join([*python_blocks(), *commands()]).encode())
        # Another training has other metrics: they stand for the weights, which copies of this project leave out.
        for path in (LAYERS / "stdlib_model" / name for name in ("config.json", "metrics.json", "tokenizer.json")):
            h.update(path.read_bytes())
    if name in (*ROW_BY_ROW, "training_example"):  # the models' sizes
        for path in sorted((LAYERS / "vendored").glob("*config.json")):
            h.update(json.dumps(json.loads(path.read_text()), sort_keys=True).encode())
    return h.hexdigest()[:16]


def tuned_data(modules: Iterable[str], arch: str) -> list[Path]:
    """The files of tuned configurations that these modules read: those of the ops that kernels name."""
    paths = (ROOT.joinpath(*m.split(".")).with_suffix(".py") for m in modules if m.startswith("dsa.kernels."))
    sources = [path.read_text() for path in paths if path.is_file()]
    return [data for data in sorted((TUNED / arch).glob("*.json")) if any(data.stem in _strings(s) for s in sources)]


@functools.cache
def _strings(source: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse(source))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def code_modules(name: str, arch: str) -> list[str]:
    """The modules of dsa, dsa_layers and dsa_engines that an entry is about."""
    if name in ("several_gpus", "oldest_dsl"):
        return _closure((op_module(path.stem.removeprefix("test_")) for path in test_files(name)), arch)
    if name not in WHOLES:
        return _closure([op_module(name), *_compat_modules(name)], arch)
    if name.endswith(ADAPTERS):
        plugin = f"dsa_engines.{name.removesuffix(ADAPTERS)}"
        return _closure([f"{plugin}.adapters", f"{plugin}.warm_up"], arch, ("dsa", "dsa_engines"))
    ops = _closure(op_modules().values(), arch)
    if name in ("drafts", "e2e", "million"):
        return [*ops, *_layers(NOT_RUN)]
    if name == "transformers":
        return [*ops, *_layers(tuple(place for place in NOT_RUN if place != "hf"))]
    if name == "generation":
        return [*ops, *_layers(tuple(place for place in NOT_RUN if place not in TINY))]
    if name == "training_example":
        examples = [module_of(path) for path in sorted((ROOT / "examples").rglob("*.py"))]
        runs = ("export.py", "manifest.py", "parallel", "training")
        return [*ops, *_layers(tuple(place for place in NOT_RUN if place not in runs)), *examples]
    if name == "parallel":
        return [*ops, *_layers(tuple(place for place in NOT_RUN if place not in ("command", "parallel", *TINY)))]
    return [*_closure(["dsa.self_test"], arch), *_layers(())] if name == "user_commands" else ops


def _compat_modules(name: str) -> list[str]:
    """The modules of dsa.compat that an entry's tests call: other libraries' signatures over the op."""
    used = {module for path in test_files(name) for module in modules_used_by(module_of(path), ("tests", "dsa"))}
    return sorted(module for module in used if module.startswith("dsa.compat."))


def _layers(left_out: tuple[str, ...]) -> list[str]:
    places = (path.relative_to(LAYERS) for path in sorted(LAYERS.rglob("*.py")))
    return [
        ".".join(("dsa_layers", *place.with_suffix("").parts)).removesuffix(".__init__")
        for place in places
        if not set(left_out) & set(place.parts)
    ]


def judge_modules(name: str, arch: str) -> list[str]:
    """The modules that decide whether an entry's tests pass and what its figures are."""
    roots = [module_of(path) for path in test_files(name)]
    if roots:
        roots += ["tests.conftest", "tests.gpu.conftest"]
    roots += [module_of(path) for path in (ROOT / "dsa_bench").glob(f"*/{name}.py")]
    if name == "e2e":
        roots.append("dsa_bench.e2e.report")
    if name == "host":
        roots += benchmarks().values()
    judges = _closure(roots, arch, ("tests", "dsa_bench"))
    own = [m for m in judges if m in roots or m.startswith("tests.gpu.")]
    return sorted({*judges, "dsa.testing", *_taken(name, own, arch)})


def _taken(name: str, files: Iterable[str], arch: str) -> set[str]:
    """What an entry's own files of tests and benchmarks take from the project: ops that give inputs, truths and
    yardsticks, with all that these import, and modules of layers and engines' plugins, with those of the same package
    that they import. Ops beneath layers are not among it: their own entries judge them. Nor are, of a whole, layers:
    `code_modules` says which of them it runs."""
    own = (file for file in files if not file.endswith(".conftest"))
    found = {module for file in own for module in modules_named_by(file, arch)}
    if name in WHOLES:
        found = {module for module in found if not module.startswith("dsa_layers")}
    return set().union(*(modules_used_by(module, (module.partition(".")[0],), arch) for module in found))


def _closure(roots: Iterable[str], arch: str, packages: tuple[str, ...] = ("dsa",)) -> list[str]:
    found, todo = set(), set(roots)
    while todo:
        found.update(*(modules_used_by(root, packages, arch) for root in todo))
        todo = {module for package in found for module in _walked(package)} - found
    return sorted(found)


def _walked(package: str) -> list[str]:
    """The modules of a package that imports all that it has, without their names."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    if not path.exists() or "iter_modules(__path__)" not in path.read_text():
        return []
    return [module_of(module) for module in path.parent.glob("[!_]*.py")]


def python_blocks() -> list[str]:
    """Every Python block of the README and the documents, in their order."""
    texts = (path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    return [block for text in texts for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)]


def commands() -> list[str]:
    """The README's commands that its reader can run as they are, or with a checkpoint."""
    return re.findall(r"^dsa (?:check|generate|tiny)\b.*", (ROOT / "README.md").read_text(), re.M)
