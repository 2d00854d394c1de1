"""The plugin replaces the parts that are switched on. A part whose functions vLLM lacks stays vLLM's own, and one line
says so. Everything else that is missing declines all parts, also in one line. In each worker process, the first model
with an indexer decides."""

import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsa_engines.vllm
from dsa.compat import deep_gemm
from dsa.runtime import backends
from dsa_engines.replacements import NotFound, find
from dsa_engines.switch import PARTS
from dsa_engines.vllm import adapters, install, register, seams, warm_up
from tests.engines.vllm import stand_in
from tests.engines.vllm.configurations import V4, V32, config

FAILING = warm_up.failing
WORKER = "vllm.v1.worker.worker_base"
V41 = V4 | {"model_type": "deepseek_v41"}


@pytest.fixture
def engine(monkeypatch):
    """Install the stand-in for vLLM on a Hopper GPU with the plugin switched on. Yield a list of the calls of
    `warm_up.failing`."""
    stand_in.put_in_place(monkeypatch)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setenv("DSA_ENGINE", "1")
    monkeypatch.delenv("DSA_ENGINE_OPS", raising=False)
    warmed = []
    monkeypatch.setattr(warm_up, "failing", lambda calls, ops: warmed.append((calls, ops)) or {})
    yield warmed
    install.uninstall()


def start(hf=V32, cache="fp8", **options):
    worker = sys.modules[WORKER].WorkerWrapperBase(config(hf or V32, cache=cache, **options))
    if hf is None:
        worker.vllm_config.model_config = None
    worker.init_device()
    assert worker.started


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def changed(before):
    after = stand_in.state()
    assert after.keys() == before.keys()
    return {name for name, value in after.items() if value is not before[name]}


def test_the_entry_point_is_found():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    entry = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]["dsa"]
    assert entry == "dsa_engines.vllm:register" and callable(register)


def test_off_it_imports_nothing():
    """Without DSA_ENGINE, `register` must import neither torch nor dsa nor vLLM. vLLM calls it in every process
    wherever dsa is installed."""
    script = (
        "import os, sys; os.environ.pop('DSA_ENGINE', None); import dsa_engines.vllm; dsa_engines.vllm.register(); "
        "assert not {'torch', 'dsa', 'vllm'} & {m.partition('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_off_by_default(engine, monkeypatch, caplog):
    monkeypatch.delenv("DSA_ENGINE")
    before = stand_in.state()
    register()
    start()
    assert changed(before) == set() and lines(caplog) == [] and engine == []


def test_nothing_changes_before_a_worker_starts(engine):
    before = stand_in.state()
    register()
    assert changed(before) == {install.HOOK}


@pytest.mark.parametrize(
    "ops",
    [
        *({part} for part in seams.REPLACED if part not in ("select", "routing")),
        {"scores", "select"},
        {"experts", "routing"},
        PARTS["vllm"],
    ],
    ids=lambda ops: ",".join(sorted(ops)),
)
def test_what_is_asked_for_is_replaced(engine, monkeypatch, caplog, ops):
    monkeypatch.setenv("DSA_ENGINE_OPS", ",".join(ops))
    register()
    before = stand_in.state()
    with caplog.at_level(logging.INFO):
        start(heads=16)
    expected = {path for op in ops for path in seams.REPLACED[op]}
    found = changed(before | {f"{seams.DEEP_GEMM}:of_deep_gemm_besides": "set"} if "scores" in ops else before)
    assert found == expected | ({"backend"} if "attention" in ops else set())
    assert lines(caplog) == [] and f"dsa: {', '.join(sorted(ops))} run on dsa's kernels" in caplog.messages
    (calls, warmed) = engine[0]
    assert warmed == frozenset(ops) and calls.heads == 16 and calls.fp8_cache


def test_the_replacements(engine, monkeypatch):
    monkeypatch.setenv("DSA_ENGINE_OPS", "scores,topk,attention")
    gemm, v4, selector = (sys.modules[name] for name in (seams.DEEP_GEMM, seams.V4, seams.SELECTOR))
    assert (
        selector._cached_get_attn_backend() == "vllm's own"
    )  # vLLM caches this choice; the plugin must clear the cache
    register()
    start()
    assert gemm._fp8_fp4_mqa_logits_impl is deep_gemm.fp8_fp4_mqa_logits
    assert gemm.of_deep_gemm_besides == "set"  # vLLM still looks up DeepGEMM's other functions
    assert gemm._paged_mqa_logits_schedule_slots(132, 4) == 132
    assert sys.modules[seams.PLAN].native_next_n_supported(3)
    assert v4.flash_mla_with_kvcache is adapters.v4_attention
    assert v4.DeepseekV4FlashMLAAttention.get_padded_num_q_heads(12) == 16
    assert selector._cached_get_attn_backend() == install.BACKEND


def test_it_is_registered_once_in_a_process(engine):
    register()
    hooked = find(install.HOOK).value
    register()
    assert find(install.HOOK).value is hooked
    start()
    before = stand_in.state()
    start(heads=32)
    assert changed(before) == set() and [calls.heads for calls, _ in engine][1] == 32
    install.uninstall()
    assert not hasattr(sys.modules[seams.TOPK].SparseIndexerTopk.forward, "__wrapped__")


def test_a_model_that_is_not_served_changes_nothing_for_one_that_is(engine, caplog):
    """The first model's graphs and buffers were made for the replacements, so these must stay."""
    register()
    start()
    before = stand_in.state()
    start(V41)
    assert changed(before) == set() and len(engine) == 1
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: model_type is deepseek_v41, and")
    assert line.endswith("; an earlier model of this process runs on dsa's kernels, which stay")


@pytest.mark.parametrize(
    ("first", "reason"), [(V41, "model_type is deepseek_v41"), (None, "AttributeError: 'NoneType' object")]
)
def test_after_a_model_that_was_declined_the_engine_stays(engine, caplog, first, reason):
    """The first model's plans and graphs were made for vLLM's kernels, so these must stay."""
    register()
    before = stand_in.state()
    start(first)
    start()
    assert changed(before) == set() and engine == []
    _, line = lines(caplog)
    assert line.startswith(f"dsa: vllm: an earlier model of this process was declined ({reason}")
    install.uninstall()
    start()
    assert len(engine) == 1


def test_after_a_model_without_an_indexer_another_is_served(engine, caplog):
    register()
    start({"model_type": "llama"}, cache="auto")
    start()
    assert len(engine) == 1
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: model_type is llama, and")


@pytest.mark.parametrize("ops", [PARTS["vllm"], {"attention"}], ids=len)
def test_another_attention_stays_alone(engine, monkeypatch, caplog, ops):
    """With a bf16 cache, vLLM chooses an attention backend that the plugin does not replace. The other ops still run on
    dsa."""
    monkeypatch.setenv("DSA_ENGINE_OPS", ",".join(ops))
    register()
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    before = stand_in.state()
    with caplog.at_level(logging.INFO):
        start(cache="auto")
    served = ops - {"attention"}
    assert changed(before) == {path for op in served for path in seams.REPLACED[op]}
    assert [warmed for _, warmed in engine] == ([served] if served else [])
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: vLLM prefers another attention for a bf16 cache")
    assert line.endswith("; attention stays the engine's own")
    assert any("run on dsa" in message for message in caplog.messages) == bool(served)


def stays(engine, caplog, call) -> str:
    before = stand_in.state()
    call()
    assert changed(before) == set() and engine == []
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: ") and line.endswith("; the engine's own kernels stay")
    return line.removeprefix("dsa: vllm: ")


def without_the_plugin(monkeypatch):
    monkeypatch.delattr(dsa_engines.vllm, "install")
    monkeypatch.setitem(sys.modules, "dsa_engines.vllm.install", None)


def with_an_unknown_word(monkeypatch):
    monkeypatch.setenv("DSA_ENGINE_OPS", "scores,moe")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_the_plugin, "ModuleNotFoundError: "),
        (with_an_unknown_word, "DSA_ENGINE_OPS: got moe; accepted for vllm are attention, experts, "),
    ],
)
def test_no_worker_gets_a_plugin_that_cannot_be_registered(engine, monkeypatch, caplog, spoil, reason):
    spoil(monkeypatch)

    def register_and_start():
        register()
        start()

    assert stays(engine, caplog, register_and_start).startswith(reason)


def with_references(monkeypatch):
    monkeypatch.setenv("DSA_BACKEND", "reference")


def on_another_gpu(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "the GPU is sm_100, and the kernels are for sm_90 (Hopper)")


def as_usual(monkeypatch):
    pass


@pytest.mark.parametrize(
    ("spoil", "model", "reason"),
    [
        (with_references, V32, "DSA_BACKEND is reference, and an engine is served by kernels alone"),
        (on_another_gpu, V32, "the GPU is sm_100, and the kernels are for sm_90 (Hopper); the engine"),
        (as_usual, V41, "model_type is deepseek_v41, and"),
        (as_usual, None, "AttributeError: 'NoneType' object has no attribute 'hf_text_config';"),
    ],
)
def test_a_worker_that_cannot_be_served_gets_the_engine_as_it_was(engine, monkeypatch, caplog, spoil, model, reason):
    register()
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    spoil(monkeypatch)
    assert stays(engine, caplog, lambda: start(model)).startswith(reason)


ATTENTION_NEEDS = {f"{seams.REGISTRY}:AttentionBackendEnum", f"{seams.SELECTOR}:_cached_get_attn_backend"}


def parts_with(path):
    """Return the parts that replace or need the attribute at `path`."""
    needed = {part: {*makers, *seams.NEEDED[part]} for part, makers in seams.REPLACED.items()}
    needed["attention"] |= ATTENTION_NEEDS
    return {part for part, paths in needed.items() if path in paths}


REQUIRED = sorted(
    {*seams.SIGNATURES, *ATTENTION_NEEDS, *(path for makers in seams.REPLACED.values() for path in makers)}
    - {install.HOOK}
)


def starts_without(engine, caplog, path) -> str:
    """Start a worker and check that only the parts with `path` stay vLLM's own. Return the reason in the log."""
    register()
    before = {name: value for name, value in stand_in.state().items() if name != path}
    start()
    missing = parts_with(path)
    assert missing and [warmed for _, warmed in engine] == [PARTS["vllm"] - missing]
    after = stand_in.state()
    replaced = {other for part in PARTS["vllm"] - missing for other in seams.REPLACED[part]}
    replaced |= {"backend"} if "attention" not in missing else set()
    assert {name for name, value in before.items() if after[name] is not value} == replaced
    said = [line.removeprefix("dsa: vllm: ").rpartition("; ") for line in lines(caplog)]
    assert {end for *_, end in said} == {f"{part} stays the engine's own" for part in missing}
    assert len(said) == len(missing)
    (reason,) = {reason for reason, *_ in said}
    return reason


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_attribute_leaves_its_parts_to_the_engine(engine, monkeypatch, caplog, path):
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    owner, name, _ = find(path)
    monkeypatch.delattr(owner, name)
    assert starts_without(engine, caplog, path) == f"{path} is not there"


@pytest.mark.parametrize("path", sorted(seams.SIGNATURES.keys() - {f"{seams.DEEP_GEMM}:_lazy_init", install.HOOK}))
def test_other_parameters_leave_their_parts_to_the_engine(engine, monkeypatch, caplog, path):
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    owner, name, _ = find(path)
    other = stand_in.function(path, [*seams.SIGNATURES[path], "another"])
    monkeypatch.setattr(owner, name, staticmethod(other))
    reason = starts_without(engine, caplog, path)
    assert reason.startswith(f"{path} takes (") and "another), and was tested with (" in reason


def without_the_hook(monkeypatch):
    monkeypatch.delattr(sys.modules[WORKER].WorkerWrapperBase, "init_device")


def with_another_hook(monkeypatch):
    monkeypatch.setattr(sys.modules[WORKER].WorkerWrapperBase, "init_device", lambda self, another: None)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(without_the_hook, " is not there;"), (with_another_hook, " takes (self, another), and was")]
)
def test_without_the_hook_nothing_is_replaced(engine, monkeypatch, caplog, spoil, reason):
    spoil(monkeypatch)
    assert stays(engine, caplog, register).startswith(f"{install.HOOK}{reason}")


def test_a_model_without_any_part_is_left_to_the_engine(engine, monkeypatch, caplog):
    monkeypatch.setenv("DSA_ENGINE_OPS", "queries")
    monkeypatch.delattr(sys.modules[seams.V32_LAYER], "fused_q")
    register()
    before = stand_in.state()
    start()
    assert changed(before) == set() and engine == [] and len(lines(caplog)) == 1


def test_a_module_that_cannot_be_imported_leaves_its_part_to_the_engine(engine, monkeypatch, caplog):
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    register()
    before = stand_in.state()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, seams.V4, None)
        start()
    served = PARTS["vllm"] - {"attention"}
    assert changed(before) == {path for part in served for path in seams.REPLACED[part]}
    (line,) = lines(caplog)
    assert line.startswith(f"dsa: vllm: {seams.V4} cannot be imported (ModuleNotFoundError: ")
    assert line.endswith("; attention stays the engine's own")


@pytest.mark.parametrize("first", ["scores", "topk"])
def test_selection_calls_what_another_part_has_put_in_place(engine, monkeypatch, first):
    monkeypatch.setenv("DSA_ENGINE_OPS", f"scores,select,{first}")
    register()
    start()
    for path in seams.REPLACED["select"].keys() & seams.REPLACED[first].keys():
        expected = deep_gemm.fp8_fp4_mqa_logits if first == "scores" else adapters.topk_prefill
        assert find(path).value.__wrapped__ is expected


@pytest.mark.parametrize(
    ("ops", "options", "reason"),
    [
        ({"select", "topk"}, {}, "DSA_ENGINE_OPS has no scores"),
        ({"routing", "topk"}, {}, "DSA_ENGINE_OPS has no experts"),
        (PARTS["vllm"], {"sharing": 2}, "with decode context parallelism vLLM reads a prompt's scores"),
    ],
)
def test_a_part_is_off_without_another_part(engine, monkeypatch, caplog, ops, options, reason):
    monkeypatch.setenv("DSA_ENGINE_OPS", ",".join(ops))
    register()
    start(**options)
    (line,) = lines(caplog)
    off = "routing" if "routing" in reason or "experts" in reason else "select"
    assert line.startswith(f"dsa: vllm: {reason}") and line.endswith(f"; {off} stays the engine's own")
    assert engine[0][1] == ops - {off}


def test_another_plugins_backend_stays(engine, caplog):
    stand_in.overrides[stand_in.AttentionBackendEnum.FLASHMLA_SPARSE] = "another.Backend"
    register()
    start()
    assert lines(caplog) == ["dsa: vllm: FLASHMLA_SPARSE is another.Backend already; attention stays the engine's own"]
    assert engine[0][1] == PARTS["vllm"] - {"attention"}
    assert stand_in.AttentionBackendEnum.FLASHMLA_SPARSE.get_path() == "another.Backend"


def kernels_do_not_compile(monkeypatch, parts):
    def fails(calls, ops):
        if ops & parts:
            raise RuntimeError("ptxas\n says no")

    monkeypatch.setattr(warm_up, "warm_up", fails)
    monkeypatch.setattr(warm_up, "failing", FAILING)


@pytest.mark.parametrize("parts", [{"attention"}, {"scores", "prefill"}, PARTS["vllm"]])
def test_parts_whose_kernels_do_not_compile_stay_vllms(engine, monkeypatch, caplog, parts):
    kernels_do_not_compile(monkeypatch, parts)
    register()
    replaced = {path: find(path).value for makers in seams.REPLACED.values() for path in makers}
    start()
    served = PARTS["vllm"] - parts
    for part, makers in seams.REPLACED.items():
        if part not in ("scores", "topk", "select"):  # which share attributes, and set others
            assert all((find(path).value is not replaced[path]) == (part in served) for path in makers)
    assert lines(caplog) == [
        f"dsa: vllm: RuntimeError: ptxas says no; {part} stays the engine's own" for part in sorted(parts)
    ]
    assert install._on_dsa == served


def test_a_second_model_whose_kernels_do_not_compile_is_named(engine, monkeypatch, caplog):
    register()
    start()
    before = stand_in.state()
    kernels_do_not_compile(monkeypatch, {"topk"})
    start(heads=32)
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: RuntimeError: ptxas says no; an earlier model of this process runs on dsa's")


def test_parts_of_an_untested_version_are_compared(engine, monkeypatch, caplog):
    """A part with other results stays off. Parts that need a layer are compared at their first call; FP4 experts,
    which cannot be compared, stay vLLM's."""
    asked = []

    def check(part, calls):
        asked.append(part)
        if part == "topk":
            raise NotFound("top-k of a step differs")

    monkeypatch.setattr(install.same_results, "check", check)
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.34.1")
    register()
    before = stand_in.state() | {f"{seams.DEEP_GEMM}:of_deep_gemm_besides": "set"}
    start()
    assert sorted(asked) == sorted(PARTS["vllm"])
    assert lines(caplog) == ["dsa: vllm: top-k of a step differs; topk stays the engine's own"]
    served = PARTS["vllm"] - {"topk"}
    assert engine[0][1] == served
    expected = {path for part in served for path in seams.REPLACED[part]} - seams.NOT_COMPARED
    assert changed(before) == expected | {"backend"}
    for path in seams.COMPARED_AT_FIRST:
        assert find(path).value.__wrapped__.__name__ == "f"  # the stand-in's function
        assert find(path).value.__code__.co_name == "call"


def test_every_replacement_has_call_sites():
    read = {name.rpartition(".")[2] for _, _, name in seams.CALL_SITES}
    for makers in seams.REPLACED.values():
        for path in makers:
            assert {*path.partition(":")[2].split(".")} & read, path
