"""The plugin puts all of its parts in place or none, in the workers, once, and says in one line why not."""

import logging
import subprocess
import sys

import pytest

import dsa_engines.vllm
from dsa import backends
from dsa.compat import deep_gemm
from dsa_engines.vllm import adapters, install, register, seams, warm_up
from tests.engines.vllm import stand_in
from tests.engines.vllm.configurations import V4, V32, config

ALL = frozenset({"scores", "topk", "attention"})
WORKER = "vllm.v1.worker.worker_base"


@pytest.fixture
def engine(monkeypatch):
    """vLLM's stand-in on a Hopper GPU with the plugin switched on, and what was warmed up."""
    stand_in.put_in_place(monkeypatch)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setenv("DSA_ENGINE", "1")
    monkeypatch.delenv("DSA_ENGINE_OPS", raising=False)
    warmed = []
    monkeypatch.setattr(warm_up, "warm_up", lambda calls, ops: warmed.append((calls, ops)))
    yield warmed
    install.uninstall()


def worker(hf=V32, **options):
    return sys.modules[WORKER].WorkerWrapperBase(config(hf, **options))


def start(hf=V32, cache="fp8", **options):
    one = worker(hf, cache=cache, **options)
    one.init_device()
    assert one.started
    return one


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def changed(before):
    after = stand_in.state()
    assert after.keys() == before.keys()
    return {name for name, value in after.items() if value is not before[name]}


def test_the_entry_point_is_found():
    """In this checkout's pyproject.toml, which an installation copies."""
    import tomllib
    from pathlib import Path

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    entry = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]["dsa"]
    assert entry == "dsa_engines.vllm:register" and callable(register)


def test_off_it_imports_nothing():
    """Every process of every vLLM beside which dsa is installed would pay for it."""
    script = (
        "import os, sys; os.environ.pop('DSA_ENGINE', None); import dsa_engines.vllm; dsa_engines.vllm.register(); "
        "assert not {'torch', 'dsa', 'vllm'} & {m.partition('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_plugin_that_cannot_be_imported(engine, monkeypatch, caplog):
    monkeypatch.delattr(dsa_engines.vllm, "install")
    monkeypatch.setitem(sys.modules, "dsa_engines.vllm.install", None)
    before = stand_in.state()
    register()
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: ") and "Error: " in line


def test_off_by_default(engine, monkeypatch, caplog):
    monkeypatch.delenv("DSA_ENGINE")
    before = stand_in.state()
    register()
    start()
    assert changed(before) == set() and lines(caplog) == [] and engine == []


def test_nothing_changes_before_a_worker_starts(engine):
    before = stand_in.state()
    register()
    assert changed(before) == {f"{WORKER}:WorkerWrapperBase.init_device"}


@pytest.mark.parametrize("ops", [{"scores"}, {"topk"}, {"attention"}, {"scores", "attention"}, ALL])
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


def test_the_replacements(engine):
    gemm, v4, selector = (sys.modules[name] for name in (seams.DEEP_GEMM, seams.V4, seams.SELECTOR))
    assert selector._cached_get_attn_backend() == "vllm's own"  # from now on it is cached
    register()
    start()
    assert gemm._fp8_fp4_mqa_logits_impl is deep_gemm.fp8_fp4_mqa_logits
    assert gemm.of_deep_gemm_besides == "set"  # DeepGEMM's other functions are there as without the plugin
    assert gemm._paged_mqa_logits_schedule_slots(132, 4) == 132
    assert sys.modules[seams.PLAN].native_next_n_supported(3)
    assert v4.flash_mla_with_kvcache is adapters.v4_attention
    assert v4.DeepseekV4FlashMLAAttention.get_padded_num_q_heads(12) == 16
    assert selector._cached_get_attn_backend() == install.BACKEND


def test_it_is_registered_once_in_a_process(engine):
    register()
    hooked = sys.modules[WORKER].WorkerWrapperBase.init_device
    register()
    assert sys.modules[WORKER].WorkerWrapperBase.init_device is hooked
    start()
    before = stand_in.state()
    start(heads=32)
    # What the first model was built with stays, and the second one's kernels are compiled, too.
    assert changed(before) == set() and [calls.heads for calls, _ in engine][1] == 32
    install.uninstall()
    forward = sys.modules[seams.TOPK].SparseIndexerTopk.forward
    assert not hasattr(forward, "__wrapped__")


def test_a_model_that_is_not_served_gets_the_engine_as_it_was(engine, caplog):
    register()
    before = stand_in.state()
    start(V4 | {"model_type": "deepseek_v41"})
    assert changed(before) == set() and engine == []
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: model_type is deepseek_v41, and") and line.endswith("own kernels stay")


def test_a_model_that_is_not_served_changes_nothing_for_one_that_is(engine, caplog):
    """The graphs and buffers of the first model were made for what is in place."""
    register()
    start()
    before = stand_in.state()
    start(V4 | {"model_type": "deepseek_v41"})
    assert changed(before) == set() and len(engine) == 1
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: model_type is deepseek_v41, and")
    assert line.endswith("; an earlier model of this process runs on dsa's kernels, which stay")


def test_behind_a_model_that_is_not_served_the_engine_stays(engine, caplog):
    """The plans and graphs of the first model are vLLM's."""
    register()
    before = stand_in.state()
    start(V4 | {"model_type": "deepseek_v41"})
    start()
    assert changed(before) == set() and engine == []
    _, line = lines(caplog)
    assert line.startswith("dsa: vllm: an earlier model of this process was declined (model_type is deepseek_v41")
    install.uninstall()
    start()
    assert len(engine) == 1


def test_behind_a_model_without_an_indexer_another_is_served(engine, caplog):
    register()
    start({"model_type": "llama"}, cache="auto")
    start()
    assert len(engine) == 1
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: model_type is llama, and")


def test_behind_a_configuration_that_cannot_be_read_the_engine_stays(engine):
    register()
    one = worker()
    one.vllm_config.model_config = None
    one.init_device()
    start()
    assert engine == []


def test_another_attention_stays_alone(engine, caplog):
    """With a bf16 cache vLLM chooses one that dsa does not replace."""
    register()
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    before = stand_in.state()
    start(cache="auto")
    assert changed(before) == {path for op in ("scores", "topk") for path in seams.REPLACED[op]}
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: vLLM prefers another attention for a bf16 cache") and len(engine) == 1
    assert line.endswith("; attention stays the engine's own") and engine[0][1] == {"scores", "topk"}


def test_attention_alone_that_is_another_replaces_nothing(engine, monkeypatch, caplog):
    monkeypatch.setenv("DSA_ENGINE_OPS", "attention")
    register()
    before = stand_in.state()
    with caplog.at_level(logging.INFO):
        start(cache="auto")
    assert changed(before) == set() and engine == [] and len(lines(caplog)) == 1
    assert not any("run on dsa" in message for message in caplog.messages)


def test_references_serve_no_engine(engine, monkeypatch, caplog):
    monkeypatch.setenv("DSA_BACKEND", "reference")
    register()
    before = stand_in.state()
    start()
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: DSA_BACKEND is reference, and an engine is served by kernels alone")


def test_another_gpu(engine, monkeypatch, caplog):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "the GPU is sm_100, and the kernels are for sm_90 (Hopper)")
    register()
    before = stand_in.state()
    start()
    assert changed(before) == set()
    assert lines(caplog) == [
        "dsa: vllm: the GPU is sm_100, and the kernels are for sm_90 (Hopper); the engine's own kernels stay"
    ]


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0", "dev"])
def test_another_version(engine, caplog, version):
    sys.modules["vllm"].__version__ = version
    before = stand_in.state()
    register()
    start()
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith(
        f"dsa: vllm: version {version} is installed, and the plugin was tested with 0.33.0; the engine"
    )


def test_an_unknown_word(engine, monkeypatch, caplog):
    monkeypatch.setenv("DSA_ENGINE_OPS", "scores,moe")
    before = stand_in.state()
    register()
    start()
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: DSA_ENGINE_OPS: got moe; accepted are attention, scores, topk;")


REQUIRED = sorted(
    {*seams.SIGNATURES, *(path for op in seams.REPLACED.values() for path in op)}
    | {f"{seams.REGISTRY}:AttentionBackendEnum", f"{seams.SELECTOR}:_cached_get_attn_backend"}
)


@pytest.mark.parametrize("path", REQUIRED)
def test_one_missing_attribute_and_nothing_is_replaced(engine, monkeypatch, caplog, path):
    """Whatever part of the plugin needs it."""
    module, _, names = path.partition(":")
    owner = sys.modules[module]
    *classes, name = names.split(".")
    for inner in classes:
        owner = getattr(owner, inner)
    if path == install.HOOK:
        monkeypatch.delattr(owner, name)
        before = stand_in.state()
        register()
    else:
        register()
        monkeypatch.delattr(owner, name)
        before = stand_in.state()
        start()
    assert changed(before) == set() and engine == []
    assert lines(caplog) == [f"dsa: vllm: {path} is not there; the engine's own kernels stay"]


@pytest.mark.parametrize("path", sorted(seams.SIGNATURES.keys() - {f"{seams.DEEP_GEMM}:_lazy_init"}))
def test_other_parameters_and_nothing_is_replaced(engine, monkeypatch, caplog, path):
    module, _, names = path.partition(":")
    owner = sys.modules[module]
    *classes, name = names.split(".")
    for inner in classes:
        owner = getattr(owner, inner)
    pinned = seams.SIGNATURES[path]
    if path != install.HOOK:
        register()
    monkeypatch.setattr(owner, name, staticmethod(stand_in.function(path, [*pinned, "another"])))
    before = stand_in.state()
    if path == install.HOOK:
        register()
    else:
        start()
    assert changed(before) == set() and engine == []
    (line,) = lines(caplog)
    assert line.startswith(f"dsa: vllm: {path} takes (") and "another), and was tested with (" in line


def test_a_module_that_cannot_be_imported(engine, monkeypatch, caplog):
    register()
    monkeypatch.setitem(sys.modules, seams.V4, None)
    before = stand_in_state_without(seams.V4)
    start()
    assert stand_in_state_without(seams.V4) == before
    (line,) = lines(caplog)
    assert line.startswith(f"dsa: vllm: {seams.V4} cannot be imported (ModuleNotFoundError: ")


def stand_in_state_without(module):
    sys.modules[module] = type(sys)(module)
    found = stand_in.state()
    sys.modules[module] = None
    return found


def test_a_configuration_without_what_is_looked_at(engine, caplog):
    register()
    one = worker()
    one.vllm_config.model_config = None
    before = stand_in.state()
    one.init_device()
    assert changed(before) == set()
    (line,) = lines(caplog)
    assert line.startswith("dsa: vllm: AttributeError: 'NoneType' object has no attribute 'hf_text_config';")


def test_another_plugins_backend_stays(engine, caplog):
    register()
    stand_in.overrides[stand_in.AttentionBackendEnum.FLASHMLA_SPARSE] = "another.Backend"
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    before = stand_in.state()
    start()
    assert changed(before) == set()
    assert lines(caplog) == ["dsa: vllm: FLASHMLA_SPARSE is another.Backend already; the engine's own kernels stay"]


def test_kernels_that_do_not_compile(engine, monkeypatch, caplog):
    def fails(calls, ops):
        raise RuntimeError("ptxas\n says no")

    monkeypatch.setattr(warm_up, "warm_up", fails)
    register()
    sys.modules[seams.DEEP_GEMM]._lazy_init()
    before = stand_in.state()
    start()
    assert changed(before) == set()
    assert lines(caplog) == ["dsa: vllm: RuntimeError: ptxas says no; the engine's own kernels stay"]


def test_every_replacement_has_call_sites():
    """In `CALL_SITES`, which are compared with vLLM's source where that is there."""
    read = {name.rpartition(".")[2] for _, _, name in seams.CALL_SITES}
    for makers in seams.REPLACED.values():
        for path in makers:
            assert {*path.partition(":")[2].split(".")} & read, path
