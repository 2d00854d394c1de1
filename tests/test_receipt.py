"""The receipt and the status page claim that a kernel works on a GPU only if its machine code has run there."""

import datetime
import re

import pytest

from dsa.ops import op_module
from dsa.runtime import backends
from tests.gpu import pictures, receipt, receipt_rows, status_table, tables
from tests.kernels import machine_code

# The first arch whose complete receipt includes the entries in `receipt.WHOLES`: sm_90.
(ARCH, *_) = [arch for arch in backends.archs() if receipt.WHOLES.keys() <= {*receipt.asked(arch)}]
TODAY = datetime.date(2026, 11, 28)


@pytest.mark.parametrize("op", receipt.archs_by_op())
def test_every_kernel_has_gpu_tests(op):
    names = [n for n in receipt.tested() if n not in receipt.WHOLES and receipt.op_module(n) == op_module(op)]
    assert names, f"{op_module(op)} has a kernel and no test_{op}.py in tests/gpu"


def test_every_kernel_belongs_to_an_entry():
    shipped = {name.partition(".")[0] for family in machine_code.families() for name in machine_code.shipped(family)}
    of_ops = {module for name in receipt.tested() for module in receipt.kernels_of(name, ARCH)}
    assert shipped <= of_ops


def test_parts_belong_to_their_op():
    modules = {name: receipt.op_module(name) for name in receipt.tested() if name not in receipt.WHOLES}
    parts = {name: module.rpartition(".")[2] for name, module in modules.items()}
    assert parts["flash_mla_with_kvcache_sparse"] == parts["flash_mla_with_kvcache"] == "flash_mla_with_kvcache"
    assert parts["indexer_warmup_attention_gradient"] == "indexer_warmup_attention"
    with pytest.raises(ValueError, match=r"op: must be one of .*, got 'nothing'"):
        receipt.op_module("nothing")


def test_the_receipt_has_no_entries_without_tests_and_no_archs_without_kernels():
    data = receipt.load()
    assert {*data} <= {*backends.archs()}
    for entries in data.values():
        assert {*entries} <= {*receipt.tested()}


@pytest.mark.parametrize(("arch", "name"), [(a, name) for a, entries in receipt.load().items() for name in entries])
def test_a_verified_entry_has_passed_and_has_its_figures(arch, name):
    entry = receipt.load()[arch][name]
    if entry["unverified"]:
        return
    assert entry["tests"] > 0 or not receipt.test_files(name)
    assert entry["failed"] == 0
    assert entry["bench"] or not receipt.has_figures(name)
    assert re.fullmatch(r"[0-9a-f]{12,40}", entry["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and re.fullmatch(r"\d+ x .+", entry["device"])


def test_of_an_arch_only_the_ops_with_kernels_for_it_are_asked(monkeypatch):
    monkeypatch.setitem(backends.ARCHS, "rms_norm", [ARCH, "sm_100"])
    assert receipt.asked(ARCH) == receipt.tested()
    assert receipt.asked("sm_100") == ["rms_norm"] and receipt.asked("sm_1") == []
    assert receipt.needed(receipt.load(), "sm_100") == ["rms_norm"]
    monkeypatch.setattr(status_table, "op_modules", lambda: {"rms_norm": op_module("rms_norm")})
    table = status_table.table("sm_100", {})
    assert "| `rms_norm` | kernel | not run |" in table and "`dsa bench e2e`" not in table
    monkeypatch.setitem(backends.ARCHS, "rms_norm", ["sm_100"])
    assert {*receipt.tested()} - {*receipt.asked(ARCH)} == {"rms_norm"}


@pytest.fixture
def entries(monkeypatch):
    """Make a receipt in which every entry of ARCH passed on TODAY. Return {name: entry}."""
    head = {"unverified": None, "date": str(TODAY)}
    found = {name: head | receipt.digests(name, ARCH) for name in receipt.tested()}
    monkeypatch.setattr(receipt, "load", lambda: {ARCH: found})
    return found


def stale(today=TODAY):
    return {name: why for name, entry in receipt.judged(today)[ARCH].items() if (why := entry["unverified"])}


def test_rows_whose_code_and_launches_are_todays_are_not_stale(entries):
    assert stale() == {}


def test_another_instruction_ends_the_rows_of_its_kernel(entries, monkeypatch):
    codes = receipt._machine_code()
    (variant, *_) = [name for name in codes if name.startswith("merge_attention_sm90.")]
    monkeypatch.setattr(receipt, "_machine_code", lambda: codes | {variant: "another code"})
    users = {name for name in receipt.tested() if "merge_attention_sm90" in receipt.kernels_of(name, ARCH)}
    assert stale() == dict.fromkeys(users, "the machine code of its kernels has changed")
    assert {"merge_attention", "e2e", "several_gpus"} <= users
    assert not {"topk_indices", "rms_norm", "oldest_dsl"} & users


def test_variants_that_exchange_their_code_end_the_rows_of_their_kernel(entries, monkeypatch):
    codes = receipt._machine_code()
    one, other, *_ = [name for name in codes if name.startswith("experts_sum_sm90.")]
    monkeypatch.setattr(receipt, "_machine_code", lambda: codes | {one: codes[other], other: codes[one]})
    assert stale() == {"parallel": "the machine code of its kernels has changed"}


def test_renamed_compile_functions_end_no_row(entries, monkeypatch):
    launches, codes = receipt._launches, receipt._machine_code()

    def renamed(variant):
        return variant.replace(".compile_", ".build_")

    def launched(function, arch):
        return [[[renamed(variant), arguments] for variant, arguments in call] for call in launches(function, arch)]

    monkeypatch.setattr(receipt, "_launches", launched)
    monkeypatch.setattr(receipt, "_machine_code", lambda: {renamed(name): code for name, code in codes.items()})
    assert stale() == {}


def test_another_argument_of_a_launch_ends_the_rows_of_its_op_alone(entries, monkeypatch):
    launches = receipt._launches

    def changed(function, arch):
        calls = launches(function, arch)
        return [[[variant, f"{x}, 4"] for variant, x in call] for call in calls] if function == "rms_norm" else calls

    monkeypatch.setattr(receipt, "_launches", changed)
    assert stale() == {"rms_norm": "its launches have changed"}


def test_passes_and_commands_are_stale_after_30_days(entries):
    assert stale(TODAY + receipt.MAX_AGE) == {}
    later = TODAY + receipt.MAX_AGE + datetime.timedelta(days=1)
    assert stale(later) == dict.fromkeys(receipt.WHOLES, "it ran more than 30 days ago")
    assert stale(today=None) == {}


def test_a_run_that_was_cut_off_says_so(entries):
    entries["e2e"]["unverified"] = "cut off"
    assert stale() == {"e2e": "cut off"}
    assert receipt.needed(receipt.load(), ARCH) == ["e2e"] or TODAY + receipt.MAX_AGE < datetime.date.today()


def test_the_status_table_says_what_is_stale(entries, monkeypatch, tmp_path):
    run = {"commit": "0" * 12, "device": "1 x GPU", "torch": "2", "dsl": "4", "tests": 3, "failed": 0, "skipped": 0}
    for entry in entries.values():
        entry.update(run, bench=[])
    entries["rms_norm"].update(kernels="another", bench=[{"shape": "1 x 512", "figure": "1 us"}])
    page = tmp_path / "status.md"
    page.write_text(f"As of {TODAY + datetime.timedelta(days=31)}.")
    monkeypatch.setattr(status_table, "PATH", page)
    rows = status_table.tables().splitlines()
    (row,) = [line for line in rows if line.startswith("| `rms_norm` |")]
    assert "| unverified: the machine code of its kernels has changed |" in row
    assert "| before: 2026-11-28, 000000000 |" in row
    assert sum("unverified: it ran more than 30 days ago" in line for line in rows) == len(receipt.WHOLES)


def test_several_gpus_has_the_ops_tests_and_parallel_the_models():
    (own,) = receipt.test_files("parallel")
    of_ops = receipt.test_files("several_gpus")
    assert own.name == "test_parallel.py"
    assert [path.stem for path in of_ops] == ["test_every_case"]


def test_the_readme_speaks_of_the_arch_on_which_most_is_measured(monkeypatch):
    row = {"ratio": 2.0, "figure": "1 GB/s", "ms": 1.0, "peer": "a peer", "peer_ms": 2.0}
    named = {name: (what, shape) for what, name, shape in tables.HEADLINES}
    entries = {n: {"unverified": None, "bench": [row | {"shape": shape}]} for n, (_, shape) in named.items()}
    stale = {name: {"unverified": "has not run"} for name in entries}
    monkeypatch.setattr(receipt, "judged", lambda: {"sm_100": entries, "sm_90": stale})
    lines = tables.headlines().splitlines()[2:]
    assert [line.count("| 1.000 ms, 1 GB/s | 2.000 ms, a peer | **2.00** | 2.00 to 2.00 |") for line in lines] == [
        1
    ] * len(named)
    monkeypatch.setattr(receipt, "judged", lambda: {"sm_90": stale})
    assert all(line.endswith("| not measured |  |  |  |  |") for line in tables.headlines().splitlines()[2:])


DETERMINISTIC = {"shape": "a, deterministic", "ratio": 0.5, "figure": "2 us", "peer": "a peer"}


def test_a_deterministic_variant_is_in_no_range_of_peers_that_are_not():
    rows = [DETERMINISTIC | {"shape": "a", "ratio": 1.1}, DETERMINISTIC, DETERMINISTIC | {"ratio": None, "peer": None}]
    assert receipt_rows.compared(rows) == rows[:1]
    alike = DETERMINISTIC | {"peer": "a peer deterministic"}
    assert receipt_rows.compared([alike]) == [alike]


def test_scores_of_another_precision_and_a_plan_are_in_no_range():
    row = {"ratio": 1.1, "peer": "a peer"}
    shapes = ("64 x 64", "64 x 64, float16 accumulators", "the plan, B 128")
    alike, half, plan = (row | {"shape": shape} for shape in shapes)
    both, alone = half | {"peer": "a peer, float16 accumulators"}, half | {"ratio": None, "peer": None}
    assert receipt_rows.compared([alike, half, plan, both, alone]) == [alike, both]


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


def test_a_pass_says_how_many_layers_it_has():
    row = {"shape": "V3.2 prefill 4096", "model": "V3.2"}
    assert receipt_rows.shape_of("e2e", row) == "V3.2 prefill 4096; 4 of 61 layers"
    assert receipt_rows.shape_of("million", row | {"model": "GLM-5.2"}) == "V3.2 prefill 4096; 4 of 78 layers"
    split = row | {"layers": 17, "published_layers": 61}
    assert receipt_rows.shape_of("parallel", split) == "V3.2 prefill 4096; 17 of 61 layers"
    for name, own in (("parallel", split | {"layers": 61}), ("drafts", row | {"layers": 61}), ("rms_norm", row)):
        assert receipt_rows.shape_of(name, own) == row["shape"]


def test_the_picture_leaves_out_what_is_not_alike(monkeypatch, tmp_path):
    entry = {"unverified": None, "device": "a GPU", "bench": [DETERMINISTIC | {"shape": "a"}, DETERMINISTIC]}
    entries = {"topk_indices": entry, "fp8_gemm_nt": entry | {"unverified": "has not run"}}
    monkeypatch.setattr(receipt, "judged", lambda: {ARCH: entries | {"e2e": {"unverified": "has not run"}}})
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda *given, **how: drawn.append((given[1], how)))
    pictures.write_speed_ups(tmp_path / "picture.png")
    dots = [(x, how["markerfacecolor"]) for x, how in drawn if "markerfacecolor" in how]
    assert dots == [([0.5], "none"), ([0.5], pictures.COLOR)]
