"""vLLM's source matches what the plugin expects of it: versions, parameters, and every reader of a replaced name."""

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from dsa_engines.replacements import check_parameters, find
from dsa_engines.switch import PARTS
from dsa_engines.vllm import adapters, experts, install, linear, prefill, register, seams
from tests.engines.vllm.configurations import V32, config
from tests.engines.vllm.engine import HopperPlatform, needs_vllm, put_in_place

pytestmark = needs_vllm
FLASH_MLA = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
COPIES = (seams.V4, seams.V32_LAYER)  # modules that import the replaced functions by name


def root() -> Path:
    return Path(importlib.util.find_spec("vllm").origin).parent


def test_this_is_a_version_that_the_plugin_serves():
    import vllm

    assert vllm.__version__.partition("+")[0] in seams.TESTED


@pytest.mark.parametrize("path", seams.SIGNATURES)
def test_signatures(path):
    name = path.partition(":")[2]
    if name not in FLASH_MLA:
        check_parameters(path, seams.SIGNATURES[path])
        return
    # The installed module lacks these functions without FlashMLA's library, so compare with its source.
    tree = ast.parse((root() / "third_party/flashmla/flash_mla_interface.py").read_text())
    (function,) = [node for node in tree.body if getattr(node, "name", None) == name]
    assert [argument.arg for argument in function.args.args] == seams.SIGNATURES[path]


def definition(module: str, name: str) -> ast.AST:
    node = ast.parse(Path(importlib.util.find_spec(module).origin).read_text())
    for part in name.split("."):
        (node,) = [child for child in node.body if getattr(child, "name", None) == part]
    return node


def reads(node: ast.AST) -> set[str]:
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}


@pytest.mark.parametrize(("module", "function", "name"), seams.CALL_SITES, ids=lambda value: value.rpartition(".")[2])
def test_call_sites(module, function, name):
    """A caller must look up the replaced name in each call. So it must not assign to the name, except to an attribute
    of `self`."""
    node = definition(module, function)
    assert name in reads(node), f"{module}:{function} does not read {name}"
    assigned = {ast.unparse(t) for n in ast.walk(node) if isinstance(n, ast.Assign) for t in n.targets}
    assert name not in assigned or name.startswith("self.")


def sources():
    for path in root().rglob("*.py"):
        if "third_party" not in path.parts:
            yield ".".join(("vllm", *path.relative_to(root()).with_suffix("").parts)), path.read_text()


def test_no_module_keeps_its_own_copy_of_what_is_replaced():
    """`from module import name` makes a second reference to a function. Only one such reference exists, and the plugin
    replaces it."""
    names = {path.partition(":")[2]: path.partition(":")[0] for op in seams.REPLACED.values() for path in op}
    names = {name: module for name, module in names.items() if "." not in name and module not in COPIES}
    found = {}
    for module, text in sources():
        for block in re.findall(r"^\s*from vllm[\w.]* import (?:\([^)]*\)|.*)", text, re.M):
            for name in {*re.findall(r"\w+", block)} & names.keys():
                found.setdefault(name, set()).add(module)
    assert found == {"native_next_n_supported": {seams.PLAN}}
    assert names["native_next_n_supported"] == seams.PLAN


def test_who_else_has_V4s_attention():
    """V4's module imports FlashMLA's functions by name, and the plugin replaces only these references."""
    text = Path(importlib.util.find_spec(seams.V4).origin).read_text()
    (block,) = re.findall(r"from vllm.v1.attention.ops.flashmla import \(([^)]*)\)", text)
    assert {*re.findall(r"\w+", block)} == {*FLASH_MLA}


@pytest.fixture
def deep_gemm():
    """Return vLLM's module for DeepGEMM, after it has looked up DeepGEMM's functions."""
    module = __import__(seams.DEEP_GEMM, fromlist=["_"])
    module._lazy_init()
    return module


@pytest.fixture
def install_ops(monkeypatch, deep_gemm):
    yield functools.partial(put_in_place, monkeypatch)
    install.uninstall()


def backend():
    return find(f"{seams.REGISTRY}:AttentionBackendEnum").value.FLASHMLA_SPARSE


def test_installed_and_taken_back(install_ops):
    paths = [path for op in seams.REPLACED.values() for path in op]
    original = backend().get_class()
    install_ops(PARTS["vllm"])
    before = {path: find(path).value for path in paths}
    cls = backend().get_class()
    assert cls is not original and issubclass(cls, original) and cls.get_name() == "FLASHMLA_SPARSE"
    assert issubclass(cls.get_impl_cls(), original.get_impl_cls())
    assert issubclass(cls.get_builder_cls(), original.get_builder_cls())
    assert cls.full_cls_name() != original.full_cls_name()
    install.uninstall()
    assert backend().get_class() is original
    assert all(find(path).value is not before[path] for path in paths)


@pytest.mark.parametrize(
    "ops", [{part, *{"select": {"scores"}, "routing": {"experts"}}.get(part, ())} for part in seams.REPLACED]
)
def test_ops_apart(install_ops, ops):
    there = {op: {path: find(path).value for path in paths} for op, paths in seams.REPLACED.items()}
    install_ops(frozenset(ops))
    replaced = {path for op in ops for path in seams.REPLACED[op]}
    for op, values in there.items():
        if op != "attention":  # attention's originals are stand-ins
            assert all((find(path).value is not value) == (path in replaced) for path, value in values.items())
    assert backend().is_overridden() == ("attention" in ops)


def test_a_cpu_is_no_hopper_gpu(caplog):
    assert not install.install(config(V32), PARTS["vllm"])
    install.uninstall()  # otherwise the plugin would decline later models of this process
    (record,) = caplog.records
    assert record.getMessage() == "dsa: vllm: torch sees no CUDA GPU; the engine's own kernels stay"


def test_the_hook(monkeypatch):
    """The worker's device is initialised before the plugin is installed."""
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    # `register` replaces this method. monkeypatch restores it after the test.
    monkeypatch.setattr(WorkerWrapperBase, "init_device", WorkerWrapperBase.init_device)
    monkeypatch.setenv("DSA_ENGINE", "1")
    monkeypatch.delenv("DSA_ENGINE_OPS", raising=False)
    seen = []
    monkeypatch.setattr(install, "install", lambda config, ops: seen.append((config, ops)))
    register()
    register()
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = type("Worker", (), {"init_device": lambda self: seen.append("device")})()
    wrapper.vllm_config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    wrapper._worker_extension_cls = None
    wrapper.init_device()
    assert seen == ["device", (wrapper.vllm_config, PARTS["vllm"])]


def test_the_names_that_the_parts_read():
    from vllm.model_executor.kernels.linear.scaled_mm import deep_gemm
    from vllm.model_executor.layers.fused_moe import activation, config
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    assert "SILU" in activation.MoEActivation.__members__
    assert {*experts.CHECKPOINT_LAYOUTS} <= Fp8MoeBackend.__members__.keys()
    assert {"has_bias", "is_lora_enabled", "in_dtype"} <= config.FusedMoEConfig.__dataclass_fields__.keys()
    for name in ("use_all2all_kernels", "use_passthrough_all2all"):
        assert isinstance(getattr(config.FusedMoEParallelConfig, name), property)
    assert issubclass(getattr(deep_gemm, linear.KERNEL), find(f"{seams.LINEAR}:Fp8BlockScaledMMLinearKernel").value)
    assert FlashMLASparseBackend.get_name() == prefill.BACKEND


def test_three_queries_of_a_sequence_are_native(plugin, deep_gemm, monkeypatch):
    plan = __import__(seams.PLAN, fromlist=["_"])
    monkeypatch.setattr(plan, "current_platform", HopperPlatform)
    monkeypatch.setattr(plan, "has_deep_gemm", lambda: True)
    assert [n for n in range(1, 9) if plan._supports_native_decode(n)] == [1, 2, 3, 4]
    install.uninstall()
    monkeypatch.setattr(deep_gemm, "current_platform", HopperPlatform)
    assert [n for n in range(1, 9) if plan._supports_native_decode(n)] == [1, 2, 4]


def test_the_plans_buffer_has_a_row_for_every_multiprocessor(plugin, deep_gemm, monkeypatch):
    monkeypatch.setattr(deep_gemm, "current_platform", HopperPlatform)
    lengths = torch.full((3, 4), 500, dtype=torch.int32)
    assert deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132).shape == (133, 2)
    assert deep_gemm._get_paged_mqa_logits_metadata_impl is not None
    assert inspect.signature(adapters.schedule_slots).parameters.keys() == {"num_sms", "next_n"}


def test_prompts_of_few_heads_are_no_decoding(plugin, monkeypatch):
    """Below 32 heads, vLLM would compute FP8 prompts and decoding as one mixed batch. The plugin separates them, if
    ranks do not divide the keys."""
    from dsa_engines.vllm.backend import DSASparseMetadataBuilder, FlashMLASparseMetadataBuilder

    def initialise(self, ranks):
        self.dcp_world_size, self.fp8_use_mixed_batch = ranks, True

    monkeypatch.setattr(FlashMLASparseMetadataBuilder, "__init__", initialise)
    assert DSASparseMetadataBuilder(1).fp8_use_mixed_batch is False
    assert DSASparseMetadataBuilder(2).fp8_use_mixed_batch is True
