"""When the plugin serves SGLang, and when it leaves SGLang unchanged. Stand-ins for SGLang's modules have the functions
of `seams.SIGNATURES` and the parts of SGLang's registries that the plugin uses."""

import functools
import logging
import sys
import types
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from dsa.runtime import backends
from dsa_engines import sglang
from dsa_engines.sglang import plugin, renamed, seams, warm_up
from tests.engines.sglang.test_hooks import BF16_POOL, FP8_POOL, OTHERS, pool_of

NAMES = {"dsa": "dsa", "nsa": "dsa", "dsv4": "dsv4"}


def function_of(parameters):
    space = {}
    exec(f'def original({", ".join(f"{p}=None" for p in parameters)}): return "SGLang\'s own"', space)
    return space["original"]


def add(modules, path, value):
    module, _, names = path.partition(":")
    owner = modules.setdefault(module, types.ModuleType(module))
    *outer, name = names.split(".")
    for each in outer:
        if not hasattr(owner, each):
            setattr(owner, each, type(each, (), {}))
        owner = getattr(owner, each)
    setattr(owner, name, value)


class HookType(Enum):
    AROUND = "around"


def hook_registry(skipped):
    """Return a stand-in for SGLang's HookRegistry. For the targets in `skipped`, it behaves as if the replacement had
    failed."""
    hooks = {}

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=None, *, source=None):
            assert hook_type is HookType.AROUND
            hooks.setdefault(target, []).append(hook)

        @classmethod
        def apply_hooks(cls):
            for target in [target for target in hooks if target not in skipped]:
                at, name = target.rsplit(".", 1)
                module = next(m for m in (at, at.rpartition(".")[0]) if m in sys.modules)
                owner = sys.modules[module] if module == at else getattr(sys.modules[module], at[len(module) + 1 :])
                for hook in hooks.pop(target):
                    setattr(owner, name, around(getattr(owner, name), hook))

    return HookRegistry


def around(original, hook):
    return functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))


class Engine:
    """Stand-ins for SGLang's modules. `before` has their functions before the plugin replaces any."""

    def __init__(self, monkeypatch):
        self.skipped, self.created, modules = set(), [], {}
        for path, parameters in seams.SIGNATURES.items():
            add(modules, path, function_of(parameters))
        add(modules, seams.HOOK_REGISTRY, hook_registry(self.skipped))
        add(modules, seams.HOOK_TYPE, HookType)
        add(modules, seams.ENVIRON, SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: True)))
        self.deterministic = SimpleNamespace(enable_deterministic_inference=False)
        add(modules, seams.EXECUTION, lambda: SimpleNamespace(deterministic=self.deterministic))
        self.parallel = SimpleNamespace(attn_tp_size=8, attn_cp_size=1, enable_cp_decode_attn_tp=False)
        add(modules, plugin.PARALLEL, lambda: self.parallel)
        add(modules, seams.RESULT, type("StandardCombineInput", (), {}))
        add(modules, seams.UP_FIRST, property(lambda method: True))
        add(modules, seams.LOADING, lambda: SimpleNamespace(load_format="auto"))
        add(modules, plugin.SPECULATION, lambda: SimpleNamespace(speculative_num_draft_tokens=None))
        self.creators = {name: self.creator(name) for name in NAMES}
        add(modules, f"{plugin.REGISTRY}:ATTENTION_BACKENDS", self.creators)

        def register_attention_backend(name):
            return lambda function: self.creators.__setitem__(name, function)

        add(modules, plugin.OVERRIDE, register_attention_backend)
        add(modules, "sglang:__version__", "0.5.23")
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        self.modules, self.before = modules, self.functions()

    def creator(self, name):
        def create(runner):
            self.created.append((name, runner))
            return f"backend {name}"

        return create

    def functions(self):
        return {path: plugin.find(path).value for path in seams.SIGNATURES}

    def replaced(self):
        return {path for path, value in self.functions().items() if value is not self.before[path]}

    def remove(self, path):
        owner, name, _ = plugin.find(path)
        delattr(owner, name)

    def serve(self, name, runner=None):
        runner = runner or runner_of(NAMES[name])
        sglang.register()
        assert self.creators[name](runner) == f"backend {name}" and self.created[-1] == (name, runner)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(plugin, "_decided", {})
    monkeypatch.setattr(plugin, "_hooked", set())
    monkeypatch.setattr(plugin, "warm_up", lambda *given: None)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setenv("DSA_ENGINE", "1")
    monkeypatch.delenv("DSA_ENGINE_OPS", raising=False)
    return Engine(monkeypatch)


def v4_pool(layout, width):
    return SimpleNamespace(
        get_swa_key_layout=lambda: SimpleNamespace(value=layout), get_swa_key_bytes_per_token=lambda: width
    )


def runner_of(family, pool=None, **more):
    config = SimpleNamespace(**{"index_n_heads": 32, "index_head_dim": 128, "index_topk": 16} | more)
    if family == "dsv4":
        pool = pool or v4_pool("v4", 584)
    else:
        pool = SimpleNamespace(**vars(pool or FP8_POOL), index_page_size=64)
    model = SimpleNamespace(hf_config=config, hf_text_config=config, num_attention_heads=64, context_len=512)
    return SimpleNamespace(token_to_kv_pool=pool, model_config=model, device="cpu")


def declined(caplog):
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    ends = "the engine's own kernels stay", "stays the engine's own"
    assert all(line.startswith("dsa: sglang: ") and line.endswith(ends) for line in lines)
    assert not any("\n" in line for line in lines)
    return lines


def paths_of(family, *ops):
    """Return the functions that are replaced for these ops, or for all, of a backend and of layers."""
    found = [seams.SEAMS[family], *seams.OF_LAYERS.values()]
    return {path for makers in found for op in makers if op in (ops or makers) for path in makers[op]}


@pytest.mark.parametrize("name", NAMES)
def test_served(engine, name, caplog):
    sglang.register()
    assert engine.replaced() == set()  # creating a backend replaces functions, loading the plugin does not
    engine.serve(name)
    assert len(engine.created) == 1 and declined(caplog) == []
    assert engine.replaced() == paths_of(NAMES[name])
    replaced, creators = engine.functions(), dict(engine.creators)
    engine.serve(name)
    assert engine.functions() == replaced and engine.creators == creators


@pytest.mark.parametrize(("family", "pool"), [("dsa", FP8_POOL), ("dsa", BF16_POOL), ("dsv4", None)])
def test_kernels_are_compiled_for_the_cache_of_the_model(engine, family, pool, caplog, monkeypatch):
    monkeypatch.setattr(plugin, "warm_up", warm_up.warm_up)
    monkeypatch.setattr(warm_up, "decoding_batches", lambda num_sms: [1])
    engine.serve(family, runner_of(family, pool))
    assert engine.replaced() == paths_of(family) and declined(caplog) == []


@pytest.mark.parametrize(("shared", "expected"), [(False, [8]), (True, [2, 8])])
@pytest.mark.parametrize("name", seams.SEAMS)
def test_heads_that_decoding_shares_are_compiled(engine, monkeypatch, name, shared, expected):
    """With --enable-cp-decode-attn-tp, several GPUs divide a prompt's tokens. In decoding, the same GPUs divide the
    heads."""
    engine.parallel.attn_cp_size, engine.parallel.enable_cp_decode_attn_tp = 4, shared
    heads = []
    monkeypatch.setattr(plugin, "warm_up", lambda model, ops, device: heads.append(model.heads))
    engine.serve(name)
    assert heads == expected * 3  # attention, scores, topk


@pytest.mark.parametrize("family", seams.SEAMS)
def test_warm_up_is_before_the_hooks_and_the_backend(engine, family, monkeypatch):
    calls = []
    monkeypatch.setattr(plugin, "warm_up", lambda *given: calls.append((given, engine.replaced(), engine.created[:])))
    engine.serve(family)
    for ((model, ops, device), replaced, created), op in zip(calls, ("attention", "scores", "topk"), strict=True):
        assert (model.heads, model.topk, model.index_heads, model.keys, model.next_n) == (8, 16, 32, 512, 1)
        assert ops == {op} and device == torch.device("cpu") and (replaced, created) == (set(), [])


def test_what_is_replaced_is_called(engine):
    engine.serve("dsa")
    resolve = plugin.find(f"{seams.UTILS}:resolve_fp8_mqa_logits_fn").value
    assert resolve() is seams.adapters.fp8_mqa_logits


WITHOUT_SCORES = "dsa: sglang: DeepSeek-V4's is served together with scores only; topk stays the engine's own"


def rename_scores(engine, more=()):
    """Rename DeepGEMM's score functions as in sgl-deep-gemm 0.2.5. `more` names additional parameters. Return a list to
    which every call appends the arguments."""
    calls = []
    for path, new in renamed.RENAMED.items():
        engine.remove(path)
        space = {"calls": calls}
        exec(f"def f({', '.join([*new.parameters, *more])}=None): calls.append(locals()); return 'DeepGEMM'", space)
        add(engine.modules, new.path, space["f"])
    return calls


def test_v4_is_served_where_scores_have_the_names_of_deep_gemm_0_2_5(engine, caplog, monkeypatch):
    calls = rename_scores(engine)
    engine.serve("dsv4")
    assert declined(caplog) == []
    monkeypatch.setattr(seams.adapters, "fp8_mqa_logits", lambda *given: "dsa")
    scores, paged = (plugin.find(path).value for path in renamed.RENAMED)
    assert scores("q", "kv", "w", "ks", "ke", clean_logits=False, max_seqlen_k=9) == "dsa" and calls == []
    assert paged("q", "cache", "w", "lens", "table", "plan", 64, False, indices="rows") == "DeepGEMM"
    plugin._decided["dsv4"] = False
    assert scores("q", "kv", "w", "ks", "ke", max_seqlen_k=9) == "DeepGEMM"
    assert [[*call.values()] for call in calls] == [
        [("q", None), "cache", "w", "lens", "table", "plan", 64, "rows"],
        [("q", None), "kv", "w", "ks", "ke", 9, None],
    ]
    for given in ({}, {"clean_logits": True, "max_seqlen_k": 9}):
        with pytest.raises(
            ValueError, match="clean_logits, max_seqlen_k: must be False and above 0 with sgl-deep-gemm"
        ):
            scores("q", "kv", "w", "ks", "ke", **given)


def test_v4_is_left_to_sglang_where_the_new_names_take_other_parameters(engine, caplog):
    rename_scores(engine, ["more"])
    engine.serve("dsv4")
    assert "deep_gemm:fp8_fp4_mqa_logits takes (" in declined(caplog)[0]
    assert declined(caplog)[1:] == [WITHOUT_SCORES]
    assert [at for at in seams.V4["topk"] if plugin.find(at).value is not engine.before[at]] == []
    assert all(plugin.find(at).value is not engine.before[at] for at in seams.V4["attention"])


def test_v4_attention_follows_sglangs_switch(engine, monkeypatch):
    engine.serve("dsv4")
    seen = []
    monkeypatch.setattr(seams.adapters, "sparse_prefill", lambda *a, batch_invariant, **k: seen.append(batch_invariant))
    monkeypatch.setattr(seams.adapters, "sparse_decode", lambda *a, batch_invariant: seen.append(batch_invariant))
    prefill, decode = (
        plugin.find(f"{seams.FLASH_MLA}:{name}").value for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")
    )
    q, cache = torch.zeros(1, 1, 8, 512), torch.zeros(1, 64, 1, 584, dtype=torch.uint8)
    for engine.deterministic.enable_deterministic_inference in (True, False):
        prefill(q[0], None, None, 1.0)
        decode(q, cache, None, None, 512, None, indices=torch.zeros(1, 1, 64, dtype=torch.int32))
    assert seen == [True, True, False, False]


@pytest.mark.parametrize("family", seams.SEAMS)
@pytest.mark.parametrize(
    "ops", ["scores", "topk", "attention,scores", " topk , scores ", "linear,attention", "experts"]
)
def test_some_of_the_ops(engine, family, ops, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "dsa")
    monkeypatch.setenv("DSA_ENGINE_OPS", ops)
    engine.serve(family)
    words, expected = {word.strip() for word in ops.split(",")}, []
    if family == "dsv4" and "topk" in words and "scores" not in words:
        words, expected = words - {"topk"}, [WITHOUT_SCORES]
    assert engine.replaced() == (paths_of(family, *words) if words else set())
    if words:
        expected.append(f"dsa: {', '.join(sorted(words))} run on dsa's kernels")
    assert [record.getMessage() for record in caplog.records if record.name == "dsa"] == expected


def switched_off(engine, monkeypatch):
    monkeypatch.delenv("DSA_ENGINE")


def with_an_unknown_op(engine, monkeypatch):
    monkeypatch.setenv("DSA_ENGINE_OPS", "scores,softmax")


def without_sglang(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)


def without_a_backend(engine, monkeypatch):
    del engine.creators["nsa"]


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (switched_off, []),
        (with_an_unknown_op, ["DSA_ENGINE_OPS: got softmax"]),
        (without_sglang, ["sglang cannot be imported"]),
        (without_a_backend, ["ATTENTION_BACKENDS has no nsa"]),
    ],
)
def test_the_plugin_does_not_register_where_it_cannot_serve(engine, spoil, reasons, monkeypatch, caplog):
    spoil(engine, monkeypatch)
    before = dict(engine.creators)
    sglang.register()
    assert engine.creators == before
    for line, reason in zip(declined(caplog), reasons, strict=True):
        assert reason in line


def left_as_it_was(engine, family, caplog, message, runner=None):
    engine.serve(family, runner)
    assert engine.replaced() == set()
    (line,) = declined(caplog)
    assert message in line
    # The plugin decides once per process and model family (`_decided`). It does not try again, because CUDA graphs of
    # the first backend may contain SGLang's kernels.
    engine.serve(family)
    assert engine.replaced() == set() and len(declined(caplog)) == 1


def on_another_gpu(engine, monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "the GPU is sm_100, and the kernels are for sm_90 (Hopper)")


def with_references(engine, monkeypatch):
    monkeypatch.setenv("DSA_BACKEND", "reference")


@pytest.mark.parametrize("family", seams.SEAMS)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (on_another_gpu, "the GPU is sm_100, and the kernels are for sm_90 (Hopper)"),
        (with_references, "DSA_BACKEND is reference"),
    ],
)
def test_sglang_stays_as_it_was_where_it_cannot_be_served(engine, family, spoil, reason, monkeypatch, caplog):
    spoil(engine, monkeypatch)
    left_as_it_was(engine, family, caplog, reason)


@pytest.mark.parametrize(
    ("family", "pool", "message"),
    [
        *(("dsa", pool_of(layout), "the cache has kv_cache_dim") for layout in OTHERS),
        ("dsv4", v4_pool("v41", 528), "the cache has layout v41 of 528 bytes"),
        ("dsv4", v4_pool("uniform_fp8", 512), "the cache has layout uniform_fp8 of 512 bytes"),
    ],
    ids=[*OTHERS, "v41", "uniform_fp8"],
)
def test_a_cache_of_another_layout_is_left_to_sglang(engine, family, pool, message, caplog):
    left_as_it_was(engine, family, caplog, message, runner_of(family, pool))


@pytest.mark.parametrize("family", seams.SEAMS)
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"index_topk": 8192}, "index_topk is 8192; accepted are up to 4096"),
        ({"index_n_heads": 24}, "index_n_heads is 24; accepted are 8, 16, 32, 64"),
        ({"index_head_dim": 64}, "index_head_dim is 64; accepted are 128"),
    ],
)
def test_another_indexer_is_left_to_sglang(engine, family, more, message, caplog):
    left_as_it_was(engine, family, caplog, message, runner_of(family, **more))


@pytest.mark.parametrize("missing", ["token_to_kv_pool", "model_config"])
def test_a_runner_of_another_form_is_left_to_sglang(engine, missing, caplog):
    runner = runner_of("dsa")
    delattr(runner, missing)
    left_as_it_was(engine, "dsa", caplog, f"has no attribute '{missing}'", runner)


PATHS = [(family, op, path) for family in seams.SEAMS for op in seams.SEAMS[family] for path in seams.SEAMS[family][op]]
OF_LAYERS = [("dsa", op, path) for makers in seams.OF_LAYERS.values() for op in makers for path in makers[op]]


@pytest.mark.parametrize(("family", "op", "path"), PATHS + OF_LAYERS)
@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_an_op_of_which_a_function_has_changed_is_left_to_sglang(engine, family, op, path, change, caplog):
    if change == "missing":
        engine.remove(path)
    else:
        owner, name, _ = plugin.find(path)
        setattr(owner, name, function_of([*seams.SIGNATURES[path], "more"]))
    engine.serve(family)
    left = {op, "topk"} if (family, op) == ("dsv4", "scores") else {op}
    (mine,) = [makers for makers in (seams.SEAMS[family], *seams.OF_LAYERS.values()) if path in makers.get(op, ())]
    kept = paths_of(family) - {path for op in left for path in mine.get(op, ())}
    assert {at for at in kept if plugin.find(at).value is not engine.before[at]} == kept
    changed = {at for at, value in engine.before.items() if at != path and plugin.find(at).value is not value}
    assert changed == kept
    assert path in declined(caplog)[0] and len(declined(caplog)) == len(left)


@pytest.mark.parametrize(
    ("family", "ops", "path"),
    [("dsa", ["topk"], seams.ENVIRON), ("dsv4", ["attention", "experts", "linear"], seams.EXECUTION)],
)
def test_an_op_whose_switch_is_missing_is_left_to_sglang(engine, family, ops, path, caplog):
    engine.remove(path)
    engine.serve(family)
    assert engine.replaced() == paths_of(family) - paths_of(family, *ops)
    lines = [f"dsa: sglang: {path} is not there; {op} stays the engine's own" for op in ops]
    assert [line for line in declined(caplog) if "FP4" not in line] == lines


def test_an_op_whose_kernels_do_not_compile_is_left_to_sglang(engine, monkeypatch, caplog):
    def fail(model, ops, device):
        if "attention" in ops:
            raise RuntimeError("ptxas:\nno room")

    monkeypatch.setattr(plugin, "warm_up", fail)
    engine.serve("dsa")
    assert engine.replaced() == paths_of("dsa") - {*seams.SEAMS["dsa"]["attention"]}
    assert declined(caplog) == ["dsa: sglang: RuntimeError: ptxas: no room; attention stays the engine's own"]


def test_products_of_deterministic_inference_are_left_to_sglang(engine, caplog):
    engine.deterministic.enable_deterministic_inference = True
    engine.serve("dsa")
    assert engine.replaced() == {at for makers in (seams.V32, seams.FP4) for op in makers.values() for at in op}
    reason = "with --enable-deterministic-inference sums must not depend on the batch"
    assert declined(caplog) == [f"dsa: sglang: {reason}; {op} stays the engine's own" for op in ("experts", "linear")]


@pytest.mark.parametrize(
    ("kind", "load_format", "is_deterministic", "expected"),
    [
        ("deepseek_v4", "auto", False, True),
        ("deepseek_v4", "dummy", False, True),
        ("deepseek_v4", "presharded", False, False),
        ("deepseek_v4", "auto", True, False),
        ("deepseek_v41", "auto", False, False),
    ],
)
def test_models_whose_fp4_experts_are_kept(engine, kind, load_format, is_deterministic, expected, monkeypatch):
    """Their gate projections are then loaded first."""
    add(engine.modules, seams.MODEL, lambda: SimpleNamespace(hf_config=SimpleNamespace(model_type=kind)))
    add(engine.modules, seams.LOADING, lambda: SimpleNamespace(load_format=load_format))
    engine.deterministic.enable_deterministic_inference = is_deterministic
    monkeypatch.setattr(backends, "backend", lambda: "cute")
    sglang.register()
    method = plugin.find(seams.UP_FIRST.rpartition(".")[0]).value()
    assert seams.keeps_fp4() == expected and method.load_up_proj_weight_first == (not expected)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU")
    assert not seams.keeps_fp4() and method.load_up_proj_weight_first


NOT_COMPARED = "version 0.6.0 was not tested, and this part is not compared with SGLang's"


@pytest.mark.parametrize(
    ("family", "left"),
    [("dsa", ["FP4 experts", "scores", "topk"]), ("dsv4", ["FP4 experts", "attention", "scores", "topk"])],
)
def test_another_version_runs_what_can_be_compared(engine, family, left, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "dsa")
    engine.modules["sglang"].__version__ = "0.6.0"
    engine.serve(family)
    assert engine.replaced() == {path for path in paths_of(family) if path in seams.COMPARED_AT_FIRST}
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:-1] == [f"dsa: sglang: {NOT_COMPARED}; {op} stays the engine's own" for op in left]
    served = ["experts", "linear"] if family == "dsv4" else ["attention", "experts", "linear"]
    assert lines[-1] == f"dsa: {', '.join(served)} run on dsa's kernels"


@pytest.mark.parametrize("factor", [1.01, 2.0])
def test_another_version_is_compared_at_the_first_call(engine, factor, caplog, monkeypatch):
    """A stand-in for SGLang's function gives ones."""
    path = f"{seams.CLASS}._forward_flashmla_kv"
    owner, name, _ = plugin.find(path)
    parameters = ", ".join(seams.SIGNATURES[path])
    space = {"torch": torch}
    exec(f"def original({parameters}): return torch.ones(3)", space)
    setattr(owner, name, space["original"])
    monkeypatch.setattr(seams.hooks, "forward_flashmla_kv", lambda original, *args: torch.full((3,), factor))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    engine.modules["sglang"].__version__ = "0.6.0"
    engine.serve("dsa")
    call = plugin.find(path).value
    given = range(len(seams.SIGNATURES[path]))
    assert call(*given)[0] == 1 and call(*given)[0] == pytest.approx(1.01 if factor < 2 else 1)
    lines = [line for line in declined(caplog) if "differs" in line]
    expected = "dsa: sglang: attention differs from the engine's own by 1.0e+00; accepted is 0.05"
    assert lines == ([] if factor < 2 else [f"{expected}; attention stays the engine's own"])


def test_both_backends_in_one_process(engine, caplog):
    engine.serve("dsa")
    engine.serve("dsv4")
    assert engine.replaced() == paths_of("dsa") | paths_of("dsv4") and declined(caplog) == []


def test_hooks_do_nothing_unless_all_are_there(engine, caplog):
    """SGLang's registry only logs a failed replacement. Then the other hooks must call SGLang's own functions."""
    path = f"{seams.CLASS}._forward_flashmla_kv"
    engine.skipped.add(path.replace(":", "."))
    engine.serve("dsa")
    fp4 = {*seams.FP4["experts"]}
    assert engine.replaced() == {at for makers in seams.V32.values() for at in makers} - {path} | fp4
    assert declined(caplog) == [
        f"dsa: sglang: SGLang's HookRegistry did not replace {path}; the engine's own kernels stay"
    ]
    for replaced in engine.replaced() - fp4:
        assert plugin.find(replaced).value() == "SGLang's own"


def test_old_names_do_not_stay_where_hooks_are_missing(engine, caplog):
    rename_scores(engine)
    engine.skipped.add(f"{seams.CLASS}._forward_flashmla_kv".replace(":", "."))
    engine.serve("dsa")
    assert "did not replace" in declined(caplog)[0]
    assert [path for path in renamed.RENAMED if not renamed.is_renamed(path)] == []
