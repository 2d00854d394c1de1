"""How peers are imported and called, and what becomes of one that cannot be, raises, or computes something else."""

import functools
import sys
import types
from pathlib import Path

import pytest
import torch

import dsa
from dsa_bench.harness import calls
from dsa_bench.harness import case as cases
from dsa_bench.harness.agreement import agree, agree_attention, agree_selected
from dsa_bench.harness.calls import Peers
from dsa_bench.peers import deep_gemm, marlin, operators, probe, scores_and_topk, topk
from dsa_bench.peers.package import Library, Operators, SourceFile

NEW, OLD = "vllm.third_party.deep_gemm", "deep_gemm"
PAGE = Path(__file__).parents[2] / "docs/reference/peers.md"

# Small enough for a CPU; every peer and every kind of argument.
SHAPES = {
    "flash_mla_sparse_fwd": [(256, 576, 64, 128, 64), (256, 512, 16, 128, 64)],
    "flash_mla_with_kvcache": [(2, 128, 16, 2)],
    "flash_mla_with_kvcache_sparse": [(2, 64, 2, 64, 128), (1, 16, 1, 64, 128)],
    "fp8_gemm_nt": [(5, 192, 256, None, None), (6, 192, 256, 4, 2), (300, 192, 256, 4, 2)],
    "fp8_mqa_logits": [(16, 64, 32, 32, True), (16, 64, 64, 64, False)],
    "fp8_fp4_gemm_nt": [(6, 256, 256, 4, 2)],
    "grouped_fp8_gemm_swiglu": [(6, 128, 256, 4, 2, 1.0)],
    "hyper_connections": [(op, 70, 256) for op in ("collapse", "expand", "mix and collapse")],
    "hyper_expand_mix": [(3, 256)],
    "hyper_mix": [(70, 256)],
    "linear_layers": [(5, 192, 256), (600, 192, 256)],
    "fp8_paged_mqa_logits": [*((2, n, 100, 32) for n in (1, 2, 3, 4)), (2, 4, 100, 32, "float16"), (4, 1, 0, 32)],
    "indexer_select": [
        (40, 2500, 32, 32, 2048, "normal"),
        (16, 64, 64, 64, 8, "plateau"),
        (9, 72, 32, 32, 3, "ascending"),
    ],
    "merge_attention": [(8, 2, 2, False)],
    "paged_indexer_select": [(2, 2500, 1, 64, 2048), (70, 100, 2, 32, 30), (2, 100, 4, 64, 30)],
    "per_token_cast_to_fp8": [(8, 256, False, ue8m0) for ue8m0 in (True, False)],
    "sliding_window_attention": [("prefill", 130, 64), ("prefill, selected", 512, 64), ("decode", 2, 64)],
    "window_attention_cast": [(20, 64, 8, 0)],
    "topk_indices": [(4, 2500, "normal", 2048), (4, 2500, "indexer", 2048), (70, 200, "plateau", 16)],
}
TOPK = ("vllm prefill", "vllm decode", "vllm persistent", "vllm cooperative", "sglang", "deepselect")
EVERYONE = {
    "flash_mla_sparse_fwd": {
        *("sgl-flash-mla", "flashmla"),
        *("sgl-flash-mla, padded to 64", "flashmla, padded to 64"),
    },
    "flash_mla_with_kvcache": {"sgl-flash-mla", "flashmla"},
    "flash_mla_with_kvcache_sparse": {
        *("sgl-flash-mla", "flashmla"),
        *("sgl-flash-mla, padded to 64", "flashmla, padded to 64"),
    },
    "fp8_gemm_nt": {"deepgemm 2.8.1", "deepgemm", "deepgemm 2.8.1, masked", "cuBLASLt"},
    "fp8_fp4_gemm_nt": {"deepgemm 2.8.1, FP8", "deepgemm, FP8", "deepgemm 2.8.1, masked, FP8"},
    "grouped_fp8_gemm_swiglu": {
        *("deepgemm 2.8.1, our cast", "deepgemm, our cast"),
        "deepgemm 2.8.1, masked, our cast",
    },
    "linear_layers": {"deepgemm 2.8.1", "cuBLASLt"},
    "fp8_mqa_logits": {"deepgemm 2.8.1, not cleaned", "deepgemm 2.8.1", "deepgemm", "cuDNN-FE"},
    "fp8_paged_mqa_logits": {"deepgemm 2.8.1", "deepgemm"},
    "hyper_connections": {"tile-kernels", "deepgemm 2.8.1, tile-kernels"},
    "hyper_expand_mix": {"deepgemm 2.8.1, tile-kernels"},
    "hyper_mix": {"deepgemm 2.8.1, TF32"},
    "indexer_select": {f"deepgemm 2.8.1, {name}" for name in TOPK},
    "merge_attention": {"vllm", "sglang"},
    "paged_indexer_select": {f"deepgemm 2.8.1, {name}" for name in TOPK},
    "per_token_cast_to_fp8": {"vllm", "sglang"},
    "sliding_window_attention": {"sgl-flash-mla", "flashmla"},
    "window_attention_cast": {"sgl-flash-mla", "flashmla"},
    "topk_indices": {*TOPK, "cuDNN-FE", "cuDNN-FE deterministic"},
}


@pytest.fixture
def small(monkeypatch, on_cpu):
    probe_only(monkeypatch, SHAPES)
    monkeypatch.setattr(cases.load("sliding_window_attention"), "SELECTED", 128)
    monkeypatch.setattr(cases.load("flash_mla_with_kvcache_sparse"), "_cache", a_small_cache)
    # This build of torch has no block-scaled product for a CPU.
    product = types.ModuleType("torch with a product")
    product._scaled_mm = scaled_mm
    monkeypatch.setitem(sys.modules, "torch with a product", product)
    monkeypatch.setattr(cases.load("fp8_gemm_nt"), "CUBLAS", Library("cuBLASLt", ("torch with a product",)))


def probe_only(monkeypatch, shapes):
    """These ops are probed, with these shapes."""
    for op in probe.probed():
        if op in shapes:
            monkeypatch.setattr(cases.load(op), "PROBED", shapes[op])
        else:
            monkeypatch.delattr(cases.load(op), "PROBED")


def a_small_cache(rows):
    pages = torch.zeros(rows // 64, 64, 1, 656, dtype=torch.uint8)
    dsa.write_kv_cache(torch.randn(rows, 576, dtype=torch.bfloat16) / 10, pages, torch.arange(rows))
    return pages


def scaled_mm(a, b, scale_a, scale_b, out_dtype):
    wide = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : b.shape[1]]
    return (a.float() * scale_a.repeat_interleave(128, 1) @ (b.float() * wide)).to(out_dtype)


WITH_SELECTED_KEYS = "window_attention_cast", [(512, 64, 8, 128)]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "shapes"), [*SHAPES.items(), WITH_SELECTED_KEYS])
def test_every_peer_is_called_as_it_demands_and_agrees(op, shapes, monkeypatch, peers, small):
    probe_only(monkeypatch, {op: shapes})
    found = list(probe.outcomes())
    assert all(outcome == "ok" for *_, outcome in found), found
    assert {name for _, _, name, _ in found} == EVERYONE[op]


def test_every_benchmark_with_peers_says_what_is_probed():
    """A case has peers where its module calls one of those in dsa_bench.peers."""
    paths = {op: Path(cases.load(op).__file__) for op in cases.benchmarks()}
    with_peers = {op for op, path in paths.items() if "from dsa_bench.peers import " in path.read_text()}
    assert probe.probed().keys() == with_peers
    for op, shapes in probe.probed().items():
        assert len({len(shape) for shape in shapes}) == 1, op


def test_every_peer_of_the_ops_that_run_on_a_cpu_is_called_here():
    """Of the others ours has no reference by itself."""
    alone = {op for op in probe.probed() if "reference=False" in Path(cases.load(op).__file__).read_text()}
    assert SHAPES.keys() == probe.probed().keys() - alone and alone == {"sparse_mla_attention"}


def test_without_peers_there_is_nothing_to_report(no_peers, small, capsys, monkeypatch):
    probe_only(monkeypatch, {"fp8_mqa_logits": [(16, 64, 32, 32, True)]})
    assert probe.main() == 0
    names = ["sgl-flash-mla", "flashmla", "deepgemm 2.8.1", "deepgemm", "vllm", "sglang", "marlin"]
    names += ["deepselect", "tile-kernels", "cuDNN-FE"]
    assert capsys.readouterr().out.splitlines() == [f"{name}: not installed" for name in names]


def test_the_probe_tells_what_is_wrong(peers, small, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("Unsupported arch\nand a stack")

    right = peers[NEW].fp8_fp4_mqa_logits
    peers[NEW].fp8_fp4_mqa_logits = lambda *arguments: right(*arguments).roll(1, 1)
    peers[OLD].fp8_mqa_logits = refuse
    del peers["cudnn"].DSA
    probe_only(monkeypatch, {"fp8_mqa_logits": [(16, 64, 32, 32, False)]})
    assert probe.main() == 1
    new, old, cudnn = sorted(capsys.readouterr().out.splitlines(), key=lambda line: -line.find("differs"))
    assert new.startswith("deepgemm 2.8.1") and "differs by " in new
    assert any(line.endswith("failed: Unsupported arch") for line in (old, cudnn))
    assert any(line.endswith("failed: module 'cudnn' has no attribute 'DSA'") for line in (old, cudnn))


@pytest.mark.slow
def test_the_probe_goes_on_where_ours_fails(peers, small, capsys, monkeypatch):
    monkeypatch.setattr(cases.load("merge_attention"), "_branches", lambda *shape: 1 / 0)
    assert probe.main(["merge_attention", "per_token_cast_to_fp8"]) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("dsa ") and first.endswith("failed: division by zero")
    assert len(rest) == 4 and all(line.endswith(" ok") for line in rest)
    with pytest.raises(ValueError, match=r"ops: must be of .*, got nothing"):
        probe.main(["nothing"])


def test_a_broken_library_is_not_taken_for_a_missing_one(monkeypatch, tmp_path, capsys):
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcuda.so.1: no such file')")
    (tmp_path / "needy_peer.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("broken_peer", "needy_peer", "absent_peer", "absent_peer.inside")
    peers = Peers.of({Library(name, (name,)): lambda module: pytest.fail("called") for name in names}, [()])
    assert peers.calls == {}
    assert peers.failed == {
        "broken_peer": "failed: libcuda.so.1: no such file",
        "needy_peer": "failed: No module named 'a_module_that_nobody_has'",
    }
    monkeypatch.setattr(probe, "LIBRARIES", (Library("a", ("broken_peer",)), Library("b", ("absent_peer",))))
    assert probe.missing() == ["a: failed: libcuda.so.1: no such file", "b: not installed"]


def test_a_library_may_be_installed_in_several_places(monkeypatch):
    monkeypatch.setitem(sys.modules, "here", None)
    monkeypatch.setitem(sys.modules, "there", types.ModuleType("there"))
    assert Library("it", ("here", "there")).load() is sys.modules["there"]
    assert Library("it", ("here",)).load() is None


PUBLISHED = {
    operators.VLLM: ["vllm/_C_stable_libtorch.abi3.so"],
    operators.SGLANG: ["sgl_kernel/sm90/common_ops.abi3.so"],
    marlin.MARLIN: ["vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so"],
}


@pytest.fixture
def stripped(monkeypatch, tmp_path, no_peers):
    """Folders with the shared libraries alone, and a package's file that must not run."""
    for file in {file for files in PUBLISHED.values() for file in files}:
        package, *_ = Path(file).parts
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch):
    """The paths that torch is asked to load."""
    paths = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    return paths


@pytest.mark.parametrize("library", PUBLISHED, ids=lambda library: library.name)
def test_operators_are_loaded_from_their_package_without_importing_it(library, stripped, asked):
    assert library.load() is torch.ops
    assert asked == [str(stripped / file) for file in PUBLISHED[library]]
    assert not {"vllm", "sgl_kernel"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("library", "file"),
    [(library, file) for library, files in PUBLISHED.items() for file in files],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_operators_without_one_of_their_files_are_not_installed(library, file, stripped, asked):
    (stripped / file).unlink()
    assert library.load() is None and asked == []
    for other, files in PUBLISHED.items():
        assert (other.load() is None) == (file in files)


def test_a_source_file_is_executed_once_and_without_its_package(monkeypatch, tmp_path):
    folder = tmp_path / "an_engine"
    (folder / "ops").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "ops/select.py").write_text("selected = object()")
    monkeypatch.syspath_prepend(tmp_path)
    file = SourceFile("it", "an_engine", "ops/select.py")
    assert file.load().selected is file.load().selected and "an_engine" not in sys.modules
    assert SourceFile("it", "an_engine", "ops/absent.py").load() is None
    assert SourceFile("it", "absent_engine", "ops/select.py").load() is None


def test_operators_of_no_package_are_not_installed(monkeypatch, tmp_path, asked):
    (tmp_path / "a_module.py").touch()
    (tmp_path / "operators.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("absent_peer", "a_module"):
        assert Operators("it", package, ("operators.so",)).load() is None
    assert asked == []


def test_a_shared_library_that_cannot_be_loaded_fails_with_the_reason(stripped, monkeypatch):
    """torch's own message is that the file could not be loaded."""
    peers = Peers.of({operators.SGLANG: lambda module: pytest.fail("called")}, [()])
    file = str(stripped / "sgl_kernel/sm90/common_ops.abi3.so")
    assert peers.calls == {} and "Could not" not in peers.failed["sglang"]
    assert peers.failed["sglang"].startswith("failed: ") and file in peers.failed["sglang"]

    def load_library(path):
        try:
            raise OSError("libcuda.so.1: cannot open shared object file")
        except OSError as error:
            raise OSError(f"Could not load this library: {path}") from error

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    peers = Peers.of({operators.VLLM: lambda module: pytest.fail("called")}, [()])
    assert peers.failed["vllm"] == "failed: libcuda.so.1: cannot open shared object file"


ENGINES = {"vllm": "vllm/_C_stable_libtorch.abi3.so", "sglang": "sgl_kernel/sm90/common_ops.abi3.so"}
DEEPSELECT = f"{topk.DEEPSELECT.package}/{topk.DEEPSELECT.file}"


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("gone", "there"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_either_engines_operators_do_without_the_others(gone, there, broken, peers, installed, monkeypatch):
    (installed / DEEPSELECT).unlink()
    if broken:
        load = torch.ops.load_library

        def load_library(path):
            if path.endswith(ENGINES[gone]):
                raise OSError("undefined symbol")
            load(path)

        monkeypatch.setattr(torch.ops, "load_library", load_library)
    else:
        (installed / ENGINES[gone]).unlink()
    q, kv = torch.randn(3, 32, 32).to(torch.float8_e4m3fn), torch.randn(2500, 32).to(torch.float8_e4m3fn)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 2500, dtype=torch.int32)
    found = {
        "top-k": topk.select([(torch.randn(3, 2500), ends, 2048)]),
        "cast": operators.cast([(torch.randn(2, 128, dtype=torch.bfloat16), True)]),
        "merge": operators.merge([([torch.randn(2, 2, 8)] * 2, [torch.randn(2, 2)] * 2)]),
        "both": scores_and_topk.select(q, (kv, torch.ones(2500)), torch.ones(3, 32), starts, ends, 2048),
    }
    for name, its in found.items():
        assert its.calls and all(there in peer and gone not in peer for peer in its.calls), name
        assert all(gone in peer and why == "failed: undefined symbol" for peer, why in its.failed.items()), name
        assert bool(its.failed) == broken, name


def test_scores_and_topk_are_no_peer_without_either_of_the_two(peers, installed, monkeypatch):
    arguments = (torch.zeros(1, 1, 1), (torch.zeros(1, 1), torch.zeros(1)), *[torch.zeros(1)] * 3, 2048)
    for file in (*ENGINES.values(), DEEPSELECT):
        (installed / file).unlink()
    assert scores_and_topk.select(*arguments) == Peers()
    for file in (*ENGINES.values(), DEEPSELECT):
        (installed / file).touch()
    monkeypatch.setitem(sys.modules, NEW, None)
    assert scores_and_topk.select(*arguments) == Peers()


def test_the_page_has_every_library_file_and_op():
    page = PAGE.read_text()
    files = {file for library in probe.LIBRARIES if isinstance(library, Operators) for file in library.files}
    for name in {library.name for library in probe.LIBRARIES} | files | {DEEPSELECT} | probe.probed().keys():
        assert name in page, name


def test_what_a_queries_rows_see():
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    assert deep_gemm.visible_keys(lengths, 3).tolist() == [[3, 4, 5], [7, 8, 9]]
    assert deep_gemm.visible_keys(lengths, 3).dtype == torch.int32


def differs(compare, got, ours, message="differs by"):
    with pytest.raises(AssertionError, match=message):
        compare(got, ours)


def test_agreement_is_loose_but_no_more():
    ours = torch.randn(100, 6, 8)
    agree(ours + 1e-3 * torch.randn_like(ours), ours)
    agree((torch.cat((ours, ours), 1), "lse"), (ours, "other"))  # padded at the end
    for got in (ours.roll(1, 2), ours * 1.1, torch.where(ours > 2, torch.nan, ours)):
        differs(agree, got, ours)
    differs(agree, ours[:, :, :4], ours, r"differs: shape \[100, 6, 4\], where ours is \[100, 6, 8\]")


def test_all_tensors_that_both_give_are_compared():
    out, lse = torch.randn(100, 6, 8), torch.rand(100, 6) + 7
    agree({"out": out, "lse": lse, "none": None}, (out, lse))
    agree((out,), (out, lse))
    for wrong in (torch.zeros_like(lse), lse.T):
        differs(agree, (out, wrong), (out, lse), "differs")
    for nothing in (None, ()):
        differs(agree, nothing, out, "differs: no tensor to compare")


def test_casts_are_compared_as_numbers():
    x = torch.randn(100, 512, dtype=torch.bfloat16)
    q, scale = ours = dsa.per_token_cast_to_fp8(x, True)
    # The same numbers with other powers of two, and other roundings.
    agree(((q.float() / 2).to(q.dtype), scale * 2), ours)
    agree(dsa.per_token_cast_to_fp8(x, False), ours)
    for wrong in ((q, torch.ones_like(scale)), (q.view(torch.uint8).roll(1, 1).view(q.dtype), scale), (q, scale * 2)):
        differs(agree, wrong, ours)


def test_lses_are_compared_where_they_mean_the_same():
    """To the base e or 2, between padding, or not at all where they have other dimensions."""
    out, lse = torch.randn(70, 6, 8), torch.randn(70, 6) + 7
    most = torch.randn(70, 6)
    padded = [torch.nn.functional.pad(out, (0, 0, 0, 2)), torch.nn.functional.pad(lse, (0, 2))]
    for theirs in ([out, most, lse], [out, lse / torch.tensor(2.0).log()], padded, [out, lse.T], out):
        agree_attention(theirs, (out, most, lse))
    for wrong in (torch.zeros_like(lse), most, lse.roll(1, 0) + 2):
        differs(agree_attention, [out, wrong], (out, most, lse), "LSE differs by")
    differs(agree_attention, [out.roll(1, 0), lse], (out, most, lse), r"^differs by")


def test_all_gradients_of_attention_are_compared():
    compare = cases.load("sparse_mla_attention")._agree
    dq, dkv, dsink = ours = torch.randn(8, 4, 64), torch.randn(30, 1, 64), torch.randn(4)
    compare({"dq": dq, "dkv": dkv[:, 0], "d_sink": dsink}, ours)
    for wrong in ((dq, dkv[:, 0] * 0, dsink), (dq, dkv[:, 0], -dsink), (dq.roll(1, 0), dkv[:, 0], dsink)):
        differs(compare, dict(enumerate(wrong)), ours)


def test_a_top_k_that_takes_contiguous_scores_gets_them(peers):
    """Rows of index scores are padded: copies are made beforehand, and no operator is left out."""
    padded, lengths = torch.randn(3, 2600)[:, :2500], torch.full((3,), 2500, dtype=torch.int32)
    found = topk.select([(padded, lengths, 2048)])
    whole = topk.select([(padded.contiguous(), lengths, 2048)])
    assert found.calls.keys() == whole.calls.keys() >= {"vllm persistent", "vllm cooperative"} and not found.failed
    for name, (call,) in found.calls.items():
        assert torch.equal(call(), whole.calls[name][0]()), name


def test_selections_agree_up_to_ties_and_a_few_keys():
    scores = torch.randn(3, 400).relu()
    compare = functools.partial(agree_selected, keys=400, scores=scores)
    order = scores.argsort(1, descending=True)
    ours = order[:, :100].int()
    compare({0: ours.flip(1)}, ours)
    compare(torch.cat((ours[:, :99], order[:, 100:101].int()), 1), ours)
    for got, message in [
        (order[:, 20:120], r"differs: 80.0% of the keys are as high as ours"),
        (ours[:, :1].expand(3, 100), "differs: a key is there twice"),
        (ours - 1000, "differs: not 100 keys of each row"),
        (ours[:, :50], "differs: not 100 keys of each row"),
    ]:
        differs(compare, got, ours, message)


def test_a_reason_is_one_line():
    assert calls.reason(RuntimeError("\n one\ntwo")) == "one" and calls.reason(KeyError()) == "KeyError"
    assert len(calls.reason(ValueError("x" * 1000))) == 200


def test_compiling_beforehand_calls_every_build(peers, monkeypatch):
    """Of grouped products every expert has all rows: each group is padded, or has its own 128."""
    called = []
    for build in (OLD, NEW):
        for name in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):
            noted = functools.partial(lambda build, a, b, d, *rest: called.append((build, *d.shape)), build)
            monkeypatch.setattr(peers[build], name, noted, raising=False)
    deep_gemm._compile(3, 192, 256, "cpu")
    deep_gemm._compile_grouped(3, 192, 256, 4, 4, "cpu")
    deep_gemm._compile_grouped(200, 192, 256, 4, 4, "cpu", (deep_gemm.NEW,))
    assert called == [
        *((NEW, 3, 192), (OLD, 3, 192)),
        *((NEW, 512, 192), (NEW, 4, 128, 192), (OLD, 512, 192)),
        (NEW, 1024, 192),
    ]


def test_products_are_compiled_by_their_rows_and_matrices_in_many_processes(peers, monkeypatch):
    started = []

    class Pool:
        def __init__(self, processes, mp_context):
            started.append(processes)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def submit(self, function, *arguments):
            started.append((function, *arguments))
            return types.SimpleNamespace(result=lambda: 1 / 0)

    monkeypatch.setattr(deep_gemm.concurrent.futures, "ProcessPoolExecutor", Pool)
    shapes = [(8, 256, 128), (1, 512, 128), (8, 256, 128), (1, 256, 128)]
    deep_gemm.compile_products(shapes, "cpu", (deep_gemm.NEW,))
    ordered = [(1, 256, 128), (1, 512, 128), (8, 256, 128)]
    assert started == [3, *((deep_gemm._compile, *shape, "cpu", (deep_gemm.NEW,)) for shape in ordered)]
    started.clear()
    deep_gemm.compile_grouped_products([(8, 256, 128, 4, 2)] * 2, "cpu")
    assert started == [1, (deep_gemm._compile_grouped, 8, 256, 128, 4, 2, "cpu", deep_gemm.BUILDS)]


def test_without_deep_gemm_nothing_is_compiled_beforehand(no_peers, monkeypatch):
    monkeypatch.setattr(deep_gemm.concurrent.futures, "ProcessPoolExecutor", lambda *a, **o: pytest.fail("a pool"))
    deep_gemm.compile_products([(1, 128, 128)])
    deep_gemm.compile_grouped_products([(1, 128, 128, 2, 1)])
