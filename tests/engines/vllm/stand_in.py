"""A stand-in for the parts of vLLM that the plugin looks up, with vLLM's names and parameters. Functions return their
path. test_engine.py compares the parameters with the installed vLLM."""

import enum
import functools
import sys
import types

from dsa_engines.vllm import seams

DEEP_GEMM_GLOBALS = tuple(
    f"_{name}_impl" for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata")
)
overrides: dict = {}


class AttentionBackendEnum(enum.Enum):
    FLASHMLA_SPARSE = "vllm's own"

    def get_path(self):
        return overrides.get(self, self.value)

    def is_overridden(self):
        return self in overrides

    def clear_override(self):
        overrides.pop(self)


def function(path: str, parameters: list[str]):
    namespace = {}
    exec(f"def f({', '.join(parameters)}): return {path!r}", namespace)
    return namespace["f"]


def never(*args, **options):
    raise AssertionError("vLLM's own function was called")


class Original:
    """A function of vLLM that notes its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args, **options):
        self.calls.append((args, options))
        return "vLLM's own"

    def assert_called_once(self, given, options=()):
        ((args, found),) = self.calls
        assert found == dict(options) and [id(arg) for arg in args] == [id(arg) for arg in given]


def put_in_place(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    overrides.clear()
    for path, parameters in seams.SIGNATURES.items():
        module, _, names = path.partition(":")
        owner = _module(monkeypatch, module)
        *classes, name = names.split(".")
        for inner in classes:
            if not hasattr(owner, inner):
                setattr(owner, inner, type(inner, (), {}))
            owner = getattr(owner, inner)
        value = function(path, ["cls", *parameters] if name == "get_padded_num_q_heads" else parameters)
        static = "cls" not in value.__code__.co_varnames and classes and parameters[:1] != ["self"]
        value = staticmethod(value) if static else value
        setattr(owner, name, classmethod(value) if name == "get_padded_num_q_heads" else value)
    deep_gemm = sys.modules[seams.DEEP_GEMM]
    for name in DEEP_GEMM_GLOBALS:
        setattr(deep_gemm, name, None)
    deep_gemm._lazy_init = functools.partial(_lazy_init, deep_gemm)
    registry = sys.modules[seams.REGISTRY]
    registry.AttentionBackendEnum = AttentionBackendEnum

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path

    registry.register_backend = register_backend
    selector = _module(monkeypatch, seams.SELECTOR)
    selector._cached_get_attn_backend = functools.cache(lambda: AttentionBackendEnum.FLASHMLA_SPARSE.get_path())
    sys.modules["vllm"].__version__ = seams.TESTED[0]

    class WorkerWrapperBase:
        def __init__(self, config):
            self.vllm_config, self.started = config, False

        def init_device(self):
            self.started = True

    sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase = WorkerWrapperBase


def _lazy_init(deep_gemm: types.ModuleType) -> None:
    """Set the globals of vLLM's module for DeepGEMM, unless one is set already, as vLLM's function does."""
    if any(getattr(deep_gemm, name) for name in DEEP_GEMM_GLOBALS):
        return
    deep_gemm.of_deep_gemm_besides = "set"
    for name in DEEP_GEMM_GLOBALS:
        setattr(deep_gemm, name, function(name, []))


def _module(monkeypatch, name: str) -> types.ModuleType:
    for end in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
        if name[:end] not in sys.modules:
            monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    return sys.modules[name]


def state() -> dict:
    """Return {path: value} of every attribute of the stand-in, and {"backend": path of FLASHMLA_SPARSE}."""
    found = {"backend": AttentionBackendEnum.FLASHMLA_SPARSE.get_path()}
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "vllm":
            for attribute, value in vars(module).items():
                found[f"{name}:{attribute}"] = value
                if isinstance(value, type):
                    found |= {f"{name}:{attribute}.{inner}": v for inner, v in vars(value).items()}
    return found
