"""Run SGLang's .py files in this process, with dsa's plugin and with stand-ins for packages that are not installed.

Import this module before any module of SGLang.
"""

import ast
import importlib
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import torch

# When these packages are imported, they look for other packages. So import them before the stand-ins exist.
import torch._dynamo
import torch._inductor.compile_fx
import transformers
import tvm_ffi
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PretrainedConfig  # noqa: F401

from dsa.runtime import backends
from dsa_engines.replacements import find
from dsa_engines.sglang import plugin, renamed, seams, warm_up
from tests.engines.sglang import batches
from tests.engines.sglang.batches import E4M3, PAGE
from tests.engines.sglang.stand_ins import stand_in

assert transformers and tvm_ffi
DEEP_GEMM = next((f for p in sys.path if (f := Path(p) / "deep_gemm" / "__init__.py").exists()), None)
PEER_PATHS = [*seams.SIGNATURES, *(new.path for new in renamed.RENAMED.values())]
PEER_FUNCTIONS = [path.partition(":")[2] for path in PEER_PATHS if path.startswith("deep_gemm:")]


def deep_gemm_module():
    """Return a module `deep_gemm` with get_num_sms and the functions that the plugin replaces. They are made from the
    source file without the native library. So their signatures are right, but they cannot run."""
    module = types.ModuleType("deep_gemm")
    module.get_num_sms = lambda: 132
    for node in ast.walk(ast.parse(DEEP_GEMM.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in PEER_FUNCTIONS:
            space = {"torch": torch}
            exec(ast.unparse(node), space)
            setattr(module, node.name, space[node.name])
    return module


def load_plugins(patch):
    """Run SGLang's `load_plugins` with dsa's plugin switched on. Return the names of all modules that are loaded
    then."""
    stand_in("sglang", "deep_gemm")
    sys.modules["deep_gemm"] = deep_gemm_module()
    plugins = module("sglang.srt.plugins")
    entry = EntryPoint("dsa", "dsa_engines.sglang:register", "sglang.srt.plugins")
    patch.setenv("DSA_ENGINE", "1")
    patch.delenv("DSA_ENGINE_OPS", raising=False)
    patch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    patch.setattr(backends, "why_no_kernels", lambda: None)
    patch.setattr(warm_up, "decoding_batches", lambda num_sms: [1])
    plugins.load_plugins()
    return set(sys.modules)


def module(name):
    return importlib.import_module(name)


def runner_of(pool):
    config = SimpleNamespace(index_n_heads=32, index_head_dim=128, index_topk=16)
    model = SimpleNamespace(hf_config=config, hf_text_config=config, num_attention_heads=64, context_len=512)
    return SimpleNamespace(token_to_kv_pool=pool, model_config=model, device="cpu")


V32_POOL = SimpleNamespace(
    kv_cache_dim=656, dsa_kv_cache_store_fp8=True, index_kpool=1, qk_rope_head_dim=64, dtype=E4M3, index_page_size=PAGE
)
V4_MAKER = f"{seams.ATTENTION}.deepseek_v4_trtllm_backend"


def serve(patch):
    """Let SGLang's registry make the backends of V3.2 and V4, without their constructors, which need a GPU.

    Return an object with `before`, {path: the attribute before a hook replaced it}, and `backend`, V3.2's backend.
    """
    paths = [path for family in seams.SEAMS for path in paths_of(family)] + [
        path for op in seams.LAYERS.values() for path in op
    ]
    before = {path: find(path).value for path in paths if not renamed.is_renamed(path)}
    creators = module(plugin.REGISTRY).ATTENTION_BACKENDS
    context = module(plugin.PARALLEL.partition(":")[0])
    patch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=8, enable_cp_decode_attn_tp=False))
    patch.setattr(context, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=3))
    v4_pool = SimpleNamespace(
        get_swa_key_layout=lambda: module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4,
        get_swa_key_bytes_per_token=lambda: 584,
    )
    patch.setattr(module(seams.BACKEND).DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    patch.setattr(module(V4_MAKER), "create_deepseek_v4_attn_backend", lambda runner: "a V4 backend")
    backend = creators["nsa"](runner_of(V32_POOL))
    assert creators["dsv4"](runner_of(v4_pool)) == "a V4 backend"
    assert plugin._decided == {"dsa": True, "dsv4": True}
    backend.token_to_kv_pool, backend.physical_page_size, backend.kv_cache_dim = V32_POOL, PAGE, 656
    backend.num_splits, backend.speculative_num_draft_tokens, backend.dsa_index_topk = 0, 3, 16
    return SimpleNamespace(before=before, backend=backend)


def publish(patch):
    bags = {"exec": SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))}
    patch.setattr(module(seams.EXECUTION.partition(":")[0]).get_context(), "_config_bags", bags)


def paths_of(family):
    return [path for makers in seams.SEAMS[family].values() for path in makers]


def index_cache(count):
    """Return (a cache uint8 [count, 64 * 132] of `count` pages; its keys, e4m3 [count * 64, 128]; their fp32
    scales)."""
    k, k_scale = batches.index_keys(count * PAGE)
    cache = torch.cat([k.view(torch.uint8).view(count, -1), k_scale.view(count, PAGE).view(torch.uint8)], 1)
    return cache, k, k_scale
