"""Nobody is told that a kernel works on a GPU when that code never ran there, or was never judged by these tests."""

import functools
import re
import shutil

import pytest

from dsa import backends, source_digest
from dsa_bench.e2e import document, drafts_document, million_document, parallel_document
from tests.gpu import headlines, receipt, receipt_rows, status_table, unverify
from tests.gpu.read_once import read_once
from tests.project_copy import FOLDERS

# Of these digests are compared below: an arch on which everything is to run.
(ARCH, *_) = [arch for arch in backends.archs() if receipt.WHOLES.keys() <= {*receipt.asked(arch)}]


@pytest.fixture(scope="module", autouse=True)
def forget():
    with read_once() as forget:
        yield forget


@pytest.mark.parametrize("op", receipt.archs_by_op())
def test_every_kernel_has_gpu_tests(op):
    module = source_digest.op_module(op)
    names = [name for name in receipt.tested() if name not in receipt.WHOLES and receipt.op_module(name) == module]
    assert names, f"{module} has a kernel and no test_{op}.py in tests/gpu"


def test_the_table_of_kernels_has_every_op_whose_bridge_names_one():
    """Which entries are asked for is read from the table, and their digests from the source."""
    for arch in backends.archs():
        found = {op for op in source_digest.op_modules() if source_digest.has_kernel(op, arch)}
        assert {op for op, archs in receipt.archs_by_op().items() if arch in archs} <= found


def test_parts_belong_to_their_op():
    parts = {
        name: receipt.op_module(name).rpartition(".")[2] for name in receipt.tested() if name not in receipt.WHOLES
    }
    assert parts["flash_mla_with_kvcache_sparse"] == parts["flash_mla_with_kvcache"] == "flash_mla_with_kvcache"
    assert parts["indexer_warmup_attention_per_head"] == "indexer_warmup_attention"
    with pytest.raises(ValueError, match=r"op: must be one of .*, got 'nothing'"):
        receipt.op_module("nothing")


@pytest.mark.parametrize("arch", backends.archs())
def test_every_test_on_a_gpu_is_an_entry(arch):
    there, run = receipt.load().get(arch, {}).keys(), f"run `python -m tests.gpu.run` on a GPU of {arch}"
    missing, unknown = {*receipt.asked(arch)} - there, there - {*receipt.tested()}
    assert not missing, f"{run}, or without one `python -m tests.gpu.unverify REASON`; no entry: {sorted(missing)}"
    assert not unknown, f"not in tests/gpu any more: {sorted(unknown)}"


def test_every_arch_of_the_receipt_has_kernels():
    assert {*receipt.load()} <= {*backends.archs()}


def entries_by_arch():
    return [(name, arch) for arch, entries in receipt.load().items() for name in entries]


@pytest.mark.parametrize(("name", "arch"), entries_by_arch())
def test_receipt_is_of_this_code(name, arch):
    entry = receipt.load()[arch][name]
    assert receipt.is_of_this_code(entry, name, arch), (
        f"{name}: run `python -m tests.gpu.run {name}` on a GPU of {arch}, "
        "or without one `python -m tests.gpu.unverify REASON`"
    )
    if entry["unverified"]:
        return
    assert entry["tests"] > 0 or not receipt.test_files(name)
    assert entry["failed"] == 0
    assert entry["bench"] or not receipt.has_figures(name)
    assert re.fullmatch(r"[0-9a-f]{12,40}", entry["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and re.fullmatch(r"\d+ x .+", entry["device"])


@pytest.fixture
def another_arch(monkeypatch):
    """One op has a kernel for another arch too."""
    rows = backends.KERNELS["rms_norm"] | {"sm_100": "dsa.kernels.elementwise.rms_norm_sm100"}
    monkeypatch.setitem(backends.KERNELS, "rms_norm", rows)
    return "sm_100"


def test_of_an_arch_only_the_ops_with_kernels_for_it_are_asked(another_arch):
    assert receipt.asked(ARCH) == receipt.tested()
    assert receipt.asked(another_arch) == ["rms_norm"] and receipt.asked("sm_1") == []


def test_an_op_that_one_arch_alone_has_leaves_the_others_entries_asked_for(monkeypatch):
    monkeypatch.setitem(backends.KERNELS, "rms_norm", {"sm_100": "dsa.kernels.elementwise.rms_norm_sm100"})
    assert {*receipt.tested()} - {*receipt.asked(ARCH)} == {"rms_norm"}


def test_a_new_row_is_an_entry_that_has_to_run_and_nothing_else(another_arch, monkeypatch, tmp_path):
    verified = {name: {"unverified": None, "digest": name} for name in receipt.tested()}
    monkeypatch.setattr(receipt, "PATH", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "digest", lambda name, arch: name)
    receipt.save({ARCH: verified})
    assert receipt.needed(receipt.load(), ARCH) == [] and receipt.needed(receipt.load(), another_arch) == ["rms_norm"]
    test_every_test_on_a_gpu_is_an_entry(ARCH)
    with pytest.raises(AssertionError, match=r"on a GPU of sm_100, .*unverify REASON`; no entry: \['rms_norm'\]"):
        test_every_test_on_a_gpu_is_an_entry(another_arch)
    assert unverify.unverify("has not run on a GPU") == ["rms_norm of sm_100"]
    assert receipt.load() == {
        ARCH: verified,
        another_arch: {"rms_norm": {"unverified": "has not run on a GPU", "unverified_at": "rms_norm"}},
    }
    test_every_test_on_a_gpu_is_an_entry(another_arch)
    test_receipt_is_of_this_code("rms_norm", another_arch)
    monkeypatch.setattr(status_table, "op_modules", lambda: {"rms_norm": source_digest.op_module("rms_norm")})
    table = status_table.table(another_arch, receipt.load()[another_arch])
    assert "| `rms_norm` | PyTorch | unverified: has not run on a GPU |" in table and "`dsa bench e2e`" not in table


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of what digests are of."""
    copied = tmp_path_factory.mktemp("project")
    for package in FOLDERS:
        leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png", "*.json")
        shutil.copytree(receipt.ROOT / package, copied / package, ignore=leave)
    for folder in ("dsa/tuned", "dsa_layers/vendored", "dsa_layers/stdlib_model"):
        shutil.copytree(receipt.ROOT / folder, copied / folder, dirs_exist_ok=True)
    shutil.copy(receipt.ROOT / "README.md", copied)
    return copied


@pytest.fixture
def change(copy, forget, monkeypatch):
    """Call it with a file, what to replace there and by what: from then on digests are of a copy of this project in
    which nothing else is changed."""
    changed = {}

    def replace(file, old, new):
        path = copy / file
        changed[path] = text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(source_digest, "_ROOT", copy)
        monkeypatch.setattr(receipt, "ROOT", copy)
        monkeypatch.setattr(receipt, "HERE", copy / "tests" / "gpu")
        monkeypatch.setattr(receipt, "TUNED", copy / "dsa" / "tuned")
        monkeypatch.setattr(receipt, "LAYERS", copy / "dsa_layers")
        forget()

    yield replace
    for path, text in changed.items():
        path.write_text(text)
    forget()


@functools.cache
def digest_of_this_project(name):
    return receipt.digest(name, ARCH)


# What is changed, and entries that this ends and does not end.
CHANGES = {
    "a kernel": (
        ("dsa/kernels/elementwise/rms_norm_sm90.py", "import cutlass\n", "import cutlass\nNEW = 1\n"),
        (
            *("rms_norm", "generation", "fuzz", "hostile_contents", "user_commands", "e2e", "host", "parallel"),
            "several_gpus",
        ),
        ("topk_indices", "fp8_gemm_nt"),
    ),
    "another arch's row": (
        (
            "dsa/ops/elementwise/rms_norm.py",
            'kernels={"sm_90": ',
            'kernels={"sm_100": "dsa.kernels.elementwise.rms_norm_sm100", "sm_90": ',
        ),
        (),
        receipt.tested(),
    ),
    "a reference": (
        ("dsa/reference/elementwise/rms_norm.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("rms_norm",),
        ("topk_indices",),
    ),
    "the model that comes with dsa": (
        ("dsa_layers/stdlib_model/tokenizer.json", '"version":"1.0"', '"version":"1.1"'),
        ("user_commands",),
        ("generation", "e2e"),
    ),
    "a tuned configuration": (
        ("dsa/tuned/sm_90/fp8_mqa_logits.json", '"winners": {', '"winners": {"new": 1, '),
        ("fp8_mqa_logits", "generation"),
        ("rms_norm",),
    ),
    "a tuned tile beside a model": (
        ("dsa/tuned/sm_90/fp8_gemm_nt.json", '"winners": {', '"winners": {"new": 1, '),
        ("fp8_gemm_nt", "fp8_gemm_nt_deep_gemm", "generation"),
        ("rms_norm", "fp8_mqa_logits"),
    ),
    "which GPU it is for": (
        ("dsa/tuned/sm_90/fp8_gemm_nt.json", '"multiprocessors": 132', '"multiprocessors": 114'),
        ("fp8_gemm_nt", "generation"),
        ("rms_norm", "fp8_mqa_logits"),
    ),
    "a gutted test": (
        ("tests/gpu/elementwise/test_rms_norm.py", "    assert ", "    assert True or "),
        ("rms_norm", "several_gpus"),
        ("topk_indices", "generation", "parallel"),
    ),
    "a tolerance": (
        ("tests/gpu/mla/test_flash_mla_sparse_fwd.py", '"abs_tol": 8e-4', '"abs_tol": 8e-1'),
        ("flash_mla_sparse_fwd",),
        ("flash_mla_with_kvcache",),
    ),
    "what compares": (("dsa/testing.py", "error > abs_tol", "error > 2 * abs_tol"), receipt.tested(), ()),
    "the tests' frame": (
        ("tests/gpu/conftest.py", "manual_seed(0)", "manual_seed(1)"),
        ("rms_norm", "generation", "user_commands", "hostile_contents"),
        ("drafts",),
    ),
    "a benchmark": (
        ("dsa_bench/elementwise/rms_norm.py", "SHAPES = ", "SHAPES = SMALLER = "),
        ("rms_norm", "host"),
        ("topk_indices", "generation", "e2e"),
    ),
    "a valid call": (
        ("tests/valid_calls/elementwise.py", '"eps": 1e-6}', '"eps": 1e-5}'),
        ("fuzz",),
        ("rms_norm", "hostile_contents"),
    ),
    "a family's hostile contents": (
        ("tests/hostile/moe.py", "PAGE = 64", "PAGE = 32"),
        ("hostile_contents",),
        ("rms_norm", "generation", "fuzz"),
    ),
    "hostile contents": (
        ("tests/hostile/__init__.py", "2**30", "2**29"),
        ("hostile_contents",),
        ("rms_norm", "generation"),
    ),
    "what a rank of two runs": (
        ("tests/gpu/parallel_worker.py", "for _ in range(3)", "for _ in range(1)"),
        ("parallel",),
        ("several_gpus", "e2e"),
    ),
    "what ranks say": (
        ("dsa_layers/parallel/rows.py", "SHARED_ROWS = 256", "SHARED_ROWS = 512"),
        ("parallel", "user_commands"),
        ("several_gpus", "generation", "e2e", "transformers"),
    ),
    "how depths are put together": (
        ("dsa_bench/e2e/full_depth.py", "alike * (found.first", "2 * alike * (found.first"),
        ("drafts",),
        ("e2e", "million", "parallel", "generation"),
    ),
    "ranks without collectives": (
        ("dsa_bench/e2e/silent.py", "return x", "return x + 0"),
        ("parallel", "million"),
        ("several_gpus", "generation", "e2e"),
    ),
    "a layer": (
        ("dsa_layers/layers/norm.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("generation", "user_commands", "e2e", "million", "parallel", "drafts"),
        ("rms_norm", "fuzz"),
    ),
    "the command": (
        ("dsa_layers/command/main.py", "import sys\n", "import sys\nNEW = 1\n"),
        ("user_commands", "parallel"),
        ("generation", "e2e"),
    ),
    "the self tests": (
        ("dsa/self_test/comparisons.py", "4e-3", "4e-2"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "a family's self tests": (
        ("dsa/self_test/moe.py", "abs_tol=0.0", "abs_tol=1.0"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "the training example": (
        ("examples/indexer_training/optimizer.py", "_DECAY = 0.1", "_DECAY = 0.2"),
        ("training_example",),
        ("generation", "user_commands", "drafts", "several_gpus"),
    ),
    "an example": (
        ("README.md", "```python\n", "```python\nNEW = 1\n"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "a command": (
        ("README.md", "dsa generate --prompt", "dsa generate --top-p 0.9 --prompt"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "every test's frame": (
        ("tests/conftest.py", "set_num_threads(1)", "set_num_threads(2)"),
        ("rms_norm", "fuzz"),
        ("drafts",),
    ),
    "a peer's call": (
        ("dsa_bench/peers/flash_mla.py", '"use_legacy": True', '"use_legacy": False'),
        ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "e2e"),
        ("rms_norm", "generation"),
    ),
    "how benchmarks time": (
        ("dsa_bench/harness/case.py", "repeats: int = 20", "repeats: int = 1"),
        ("flash_mla_sparse_fwd", "rms_norm"),
        ("generation",),
    ),
    "the tiny models": (
        ("dsa_layers/tiny/__init__.py", "from dsa_layers", "NEW = 1\nfrom dsa_layers"),
        ("generation", "user_commands", "parallel"),
        ("e2e", "rms_norm"),
    ),
    "the sizes of the models": (
        ("dsa_layers/vendored/deepseek_v32_config.json", '"num_attention_heads": 128', '"num_attention_heads": 64'),
        ("e2e", "parallel"),
        ("rms_norm",),
    ),
    "an op that a test takes as the truth": (
        ("dsa/ops/mla/sliding_window_attention.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("sliding_window_attention", "window_attention_cast"),
        ("merge_attention", "flash_mla_sparse_fwd"),
    ),
    "an op that a benchmark has beside": (
        ("dsa/ops/moe/expert_routing.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("expert_routing", "grouped_fp8_gemm_swiglu", "route_by_table"),
        ("per_token_cast_to_fp8", "linear_fp32", "merge_attention"),
    ),
    "what tests call an op through": (
        ("dsa_layers/layers/hyper_sublayer.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("hyper_collapse_norm_cast", "hyper_expand_mix", "generation"),
        ("hyper_connections", "rms_norm", "host"),
    ),
    "an engine's hooks": (
        ("dsa_engines/sglang/hooks.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("sglang_adapters",),
        ("vllm_adapters", "rms_norm", "generation"),
    ),
    "a document": (("README.md", "## Status", "## State of things"), (), receipt.tested()),
}


@pytest.mark.parametrize(("replaced", "ends", "keeps"), CHANGES.values(), ids=CHANGES)
def test_what_ends_an_entry(change, replaced, ends, keeps):
    before = {name: digest_of_this_project(name) for name in (*ends, *keeps)}
    change(*replaced)
    after = {name: receipt.digest(name, ARCH) for name in before}
    assert {name for name in before if before[name] != after[name]} == set(ends)


@pytest.mark.parametrize(
    ("name", "generated", "path"),
    [
        ("e2e", document, "docs/e2e.md"),
        ("parallel", parallel_document, "docs/parallel.md"),
        ("million", million_document, "docs/million.md"),
        ("drafts", drafts_document, "docs/drafter.md"),
    ],
    ids=("e2e", "parallel", "million", "drafts"),
)
def test_tables_of_models_are_generated(name, generated, path):
    """Once the entry is verified; before, the document may still have to say so, but its rows are the entry's."""
    entry, text = receipt.load()[ARCH][name], (receipt.ROOT / path).read_text()
    run = f"run `python -m {generated.__name__} tests/gpu/receipt.json {path} {ARCH}`"
    if not entry["unverified"]:
        assert generated.inserted(text, entry) == text, run
    elif entry.get("bench"):
        assert f"of commit {entry['commit']}." in text, run
    assert generated.BEGIN in text


def test_several_gpus_has_the_ops_tests_and_parallel_the_models():
    (own,) = receipt.test_files("parallel")
    of_ops = receipt.test_files("several_gpus")
    assert own.name == "test_parallel.py" and own not in of_ops and len(of_ops) > 5
    assert all(receipt.op_module(path.stem.removeprefix("test_")) for path in of_ops)


@pytest.fixture
def three_entries(monkeypatch, tmp_path):
    """One of this code, one of code that has changed, and one that says already that it did not run."""
    monkeypatch.setattr(receipt, "PATH", tmp_path / "receipt.json")
    monkeypatch.setattr(receipt, "asked", lambda arch: ["fuzz", "rms_norm", "rotary", "e2e"] if arch == ARCH else [])
    monkeypatch.setattr(receipt, "digest", lambda name, arch: "1")
    entries = {"rms_norm": {"unverified": None, "digest": "1", "bench": [{"ms": 1.0}]}}
    entries |= {"rotary": {"unverified": None, "digest": "0"}, "e2e": {"unverified": "no peers", "unverified_at": "1"}}
    receipt.save({ARCH: entries})
    return entries


def test_what_did_not_run_is_marked_and_nothing_else(three_entries, capsys):
    assert unverify.main(["no GPU here"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"fuzz of {ARCH}", f"rotary of {ARCH}"]
    reason = {"unverified": "no GPU here", "unverified_at": "1"}
    marked = three_entries | {"fuzz": reason, "rotary": three_entries["rotary"] | reason}  # with what it measured
    assert receipt.load()[ARCH] == marked
    assert unverify.main(["another reason"]) == 0
    assert capsys.readouterr().out.startswith("nothing is marked")
    assert receipt.load()[ARCH] == marked


def test_some_entries_alone_are_marked(three_entries, capsys):
    assert unverify.main(["no GPU here", "rms_norm", "fuzz"]) == 0
    assert receipt.load()[ARCH] == three_entries | {"fuzz": {"unverified": "no GPU here", "unverified_at": "1"}}


def test_a_reason_is_of_the_code_for_which_it_was_given(three_entries, monkeypatch, capsys):
    """Tests that have passed, and whose benchmark alone is missing, say nothing of a kernel that has changed since."""
    passed = {"unverified": "its tests passed", "unverified_at": "1", "digest": "0", "bench": [{"ms": 1.0}]}
    receipt.save({ARCH: three_entries | {"rotary": passed}})
    assert receipt.needed(receipt.load(), ARCH) == ["fuzz"]
    monkeypatch.setattr(receipt, "digest", lambda name, arch: "2" if name == "rotary" else "1")
    assert receipt.needed(receipt.load(), ARCH) == ["fuzz", "rotary"]
    with pytest.raises(AssertionError, match=r"run `python -m tests.gpu.run rotary` on a GPU"):
        test_receipt_is_of_this_code("rotary", ARCH)
    assert unverify.main(["changed", "rotary"]) == 0
    assert receipt.load()[ARCH]["rotary"] == passed | {"unverified": "changed", "unverified_at": "2"}
    test_receipt_is_of_this_code("rotary", ARCH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: REASON"),
        ([" "], "REASON: must be a line of text without |"),
        (["a | b"], "REASON: must be a line of text without |, for a table's cell, got 'a | b'"),
        (["no GPU", "nothing", "fuzz"], "ENTRY: must be of "),
    ],
)
def test_what_cannot_be_marked(three_entries, capsys, arguments, message):
    with pytest.raises(SystemExit):
        unverify.main(arguments)
    assert message in capsys.readouterr().err
    assert receipt.load()[ARCH] == three_entries


def test_the_readme_speaks_of_the_arch_on_which_most_is_measured(monkeypatch, tmp_path):
    row = {"model": "V3.2", "ratio": 2.0, "figure": "1 us", "peer": "a peer"}
    rows = [row | {"shape": shape} for _, _, shape in headlines.ROWS]
    entries = {name: {"unverified": None, "bench": [row]} for (_, name, _), row in zip(headlines.ROWS, rows)}
    monkeypatch.setattr(receipt, "PATH", tmp_path / "receipt.json")
    unrun = {name: {"unverified": "has not run"} for name in entries}
    receipt.save({"sm_100": entries, "sm_90": unrun})
    assert headlines.table().count("2.00 (a peer); 2.00 to 2.00 over 1 shapes (the same)") == len(rows)
    receipt.save({"sm_100": {"rms_norm": {"unverified": "has not run"}}, "sm_90": {**entries, "e2e": unrun["e2e"]}})
    text = headlines.table()
    assert text.count("(a peer)") == len(rows) - 1 and text.endswith("not yet run on this code: has not run | |")


def test_the_peers_behind_a_range_are_those_of_its_ratios(monkeypatch):
    """And the one behind the first figure is that of its shape."""
    (_, name, shape), *_ = headlines.ROWS
    row = {"shape": shape, "ratio": 1.5, "figure": "1 us", "peer": "a peer"}
    rows = [row, row | {"shape": "b", "ratio": 1.1, "peer": "another, padded"}]
    rows.append(row | {"shape": "c, float16 accumulators", "ratio": 3.0, "peer": "a third"})
    monkeypatch.setattr(receipt, "load", lambda: {ARCH: {name: {"unverified": None, "bench": rows}}})
    over = "1.50 (a peer); 1.10 to 1.50 over 2 shapes (a peer; another, padded)"
    assert f"| {over}; float16 accumulators beside float32 ones: 3.00 |" in headlines.table()


DETERMINISTIC = {"shape": "a, deterministic", "ratio": 0.5, "figure": "2 us", "peer": "a peer"}


def test_a_deterministic_variant_is_in_no_range_of_peers_that_are_not():
    rows = [DETERMINISTIC | {"shape": "a", "ratio": 1.1}, DETERMINISTIC, DETERMINISTIC | {"ratio": None, "peer": None}]
    assert receipt_rows.compared(rows) == rows[:1]
    assert receipt_rows.other_kinds(rows) == "; deterministic beside one that is not: 0.50"
    alike = DETERMINISTIC | {"peer": "a peer deterministic"}
    assert receipt_rows.compared([alike]) == [alike] and receipt_rows.other_kinds([alike]) == ""


def test_scores_of_another_precision_and_a_plan_are_in_no_range():
    row = {"ratio": 1.1, "peer": "a peer"}
    shapes = ("64 x 64", "64 x 64, float16 accumulators", "the plan, B 128")
    alike, half, plan = (row | {"shape": shape} for shape in shapes)
    both, alone = half | {"peer": "a peer, float16 accumulators"}, half | {"ratio": None, "peer": None}
    assert receipt_rows.compared([alike, half, plan, both, alone]) == [alike, both]
    kinds = receipt_rows.other_kinds([alike, half, plan, both, alone])
    assert kinds == "; float16 accumulators beside float32 ones: 1.10; the plan alone: 1.10"
    assert receipt_rows.OTHER_KINDS.keys() <= headlines.MARKS.keys()


def test_a_pass_that_waits_for_the_host_is_in_no_range():
    parts = {"indexer": 1.0, "attention": 6.0}
    row = {
        "shape": "a",
        "ratio": 1.25,
        "ms": 8.0,
        "parts": parts,
        "peer_ms": 9.0,
        "peer_parts": parts,
        "peer": "a peer",
    }
    ours, theirs = row | {"ms": 9.4, "ratio": 0.96}, row | {"peer_ms": 20.0, "ratio": 2.5}
    assert receipt_rows.compared([row, ours, theirs, row | {"peer_parts": None}]) == [row, row | {"peer_parts": None}]
    assert receipt_rows.other_kinds([row, ours, theirs]) == "; where a pass waits for the host: 0.96, 2.50"


def test_a_pass_says_how_many_layers_it_has():
    row = {"shape": "V3.2 prefill 4096", "model": "V3.2"}
    assert receipt_rows.shape_of("e2e", row) == "V3.2 prefill 4096; 4 of 61 layers"
    assert receipt_rows.shape_of("million", row | {"model": "GLM-5.2"}) == "V3.2 prefill 4096; 4 of 78 layers"
    split = row | {"layers": 17, "published_layers": 61}
    assert receipt_rows.shape_of("parallel", split) == "V3.2 prefill 4096; 17 of 61 layers"
    for name, own in (("parallel", split | {"layers": 61}), ("drafts", row | {"layers": 61}), ("rms_norm", row)):
        assert receipt_rows.shape_of(name, own) == row["shape"]


def test_the_picture_marks_what_is_not_of_this_code_and_not_alike(monkeypatch, tmp_path):
    entry = {"unverified": None, "device": "a GPU", "bench": [DETERMINISTIC | {"shape": "a"}]}
    earlier, alone = entry | {"unverified": "has not run"}, entry | {"bench": []}
    entries = {"topk_indices": entry, "fp8_gemm_nt": earlier, "merge_attention": alone, "rotary": entry}
    monkeypatch.setattr(receipt, "load", lambda: {ARCH: entries | {"e2e": {"unverified": "has not run"}}})
    path = tmp_path / "picture.png"
    assert headlines.write_picture(path) == ["today's code", "earlier code: today's is unverified"]
    entry["bench"].append(DETERMINISTIC)
    assert headlines.write_picture(path)[-1] == "deterministic beside one that is not"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_changed_digest_is_noticed(monkeypatch):
    valid = {"unverified": None, "digest": "1" * 16, "tests": 1, "failed": 0, "bench": [{}]}
    valid |= {"commit": "0" * 12, "date": "2026-01-01", "device": "1 x NVIDIA H200"}
    monkeypatch.setattr(receipt, "load", lambda: {ARCH: {"rms_norm": valid}})
    monkeypatch.setattr(receipt, "digest", lambda name, arch: "1" * 16)
    test_receipt_is_of_this_code("rms_norm", ARCH)
    for change in ({"digest": "0" * 16}, {"failed": 1}, {"tests": 0}, {"bench": []}, {"commit": "1234-changed"}):
        monkeypatch.setattr(receipt, "load", lambda change=change: {ARCH: {"rms_norm": valid | change}})
        with pytest.raises(AssertionError):
            test_receipt_is_of_this_code("rms_norm", ARCH)
