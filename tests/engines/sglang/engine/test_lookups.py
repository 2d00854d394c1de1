"""SGLang's source matches what the plugin expects of it, and SGLang's registry installs the hooks."""

import ast
import importlib.util
from pathlib import Path

import pytest

from dsa_engines.replacements import check_parameters, find
from dsa_engines.sglang import adapters, plugin, renamed, seams
from tests.engines.sglang.engine.process import module, paths_of


def test_loading_plugins_imports_no_backend(loaded):
    """SGLang loads plugins in every process, also without a model. Such a process must not import an attention
    backend."""
    assert not {seams.BACKEND, seams.V4_BACKEND, seams.V4_MODEL, seams.FLASH_MLA} & loaded
    creators = module(plugin.REGISTRY).ATTENTION_BACKENDS
    assert {name: creators[name].dsa_family for name in plugin.FAMILIES} == plugin.FAMILIES


@pytest.mark.parametrize("path", seams.SIGNATURES)
def test_signatures(loaded, path):
    check_parameters(*renamed.installed(path, seams.SIGNATURES[path]))


def source_of(name):
    return Path(importlib.util.find_spec(name).origin)


def functions(tree, prefix=""):
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def reads(node):
    """Return the names that a function reads: "name" and "object.name". For `from module import name` also
    "module.name", without the name after `as`."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            names.add(each.id)
        elif isinstance(each, ast.Attribute):
            names.add(ast.unparse(each))
        elif isinstance(each, ast.ImportFrom):
            names |= {f"{each.module}.{alias.name}" for alias in each.names} | {alias.name for alias in each.names}
    return names


@pytest.mark.parametrize(("name", "function", "read"), seams.CALL_SITES)
def test_call_sites(loaded, name, function, read):
    found = dict(functions(ast.parse(source_of(name).read_text())))
    assert read in reads(found[function])


def test_what_deterministic_means(loaded):
    """V4's hooks read the setting from which V3.2's backend computes `num_splits`."""
    found = dict(functions(ast.parse(source_of(seams.BACKEND).read_text())))
    (splits,) = [
        ast.unparse(node.value)
        for node in ast.walk(found[f"{seams.CLASS.partition(':')[2]}.__init__"])
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.num_splits"
    ]
    assert splits == "1 if get_exec().deterministic.enable_deterministic_inference else 0"
    assert module(seams.BACKEND).get_exec is find(seams.EXECUTION).value


# {other reader of a replaced name in SGLang: why it needs no hook}
ATTENTION, OPS = seams.ATTENTION, "sglang.kernels.ops.attention"
ELSEWHERE = {
    f"{ATTENTION}.dsa.dsa_backend_mtp_precompute": "the plan, which is a method of the same backend",
    f"{ATTENTION}.dsa.dsa_indexer_kpool": "GLM-5.3, with pools of keys",
    f"{ATTENTION}.dsa.kpool_plan": "GLM-5.3, with pools of keys",
    f"{ATTENTION}.dsa.utils": "the resolvers themselves",
    f"{ATTENTION}.dsa.dsa_topk_backend": "the selection itself",
    f"{ATTENTION}.dsa.gfx950_fused_indexer": "an AMD GPU",
    f"{ATTENTION}.dsa.dsa_indexer:Indexer._get_topk_ragged": "an AMD and an Intel GPU's scores",
    f"{ATTENTION}.dsa_backend:DeepseekSparseAttnBackend._forward_flashmla_sparse": "itself",
    f"{ATTENTION}.dsa_backend:DeepseekSparseAttnBackend._forward_flashmla_kv": "itself",
    f"{ATTENTION}.flashmla_backend": "dense attention, which the hook leaves to SGLang",
    f"{ATTENTION}.hip_flash_mla": "an AMD GPU",
    f"{ATTENTION}.dsv4.low_ratio_backend_hip": "an AMD GPU",
    f"{ATTENTION}.dsv4.indexer:topk_transform_paged_from_metadata": "DeepSeek-V4.1",
    f"{ATTENTION}.dsv4.v41_indexer.scoring": "DeepSeek-V4.1",
    f"{ATTENTION}.dsv4.v41_indexer.sparse_table": "DeepSeek-V4.1",
    f"{OPS}.dsv4.candidate_blocks": "DeepSeek-V4.1",
    f"{OPS}.dsv4.candidate_blocks_hip": "an AMD GPU",
    f"{OPS}.dsv4.topk": "DeepSeek-V4's selection itself",
    f"{OPS}.dsa.tilelang_kernel": "a kernel of the same name",
    f"{OPS}.flash_mla_interface": "FlashMLA's functions themselves",
}


def test_no_other_function_reads_what_is_replaced(loaded):
    """A function that reads a replaced name must be in CALL_SITES or in ELSEWHERE. Otherwise no test covers its call of
    the hook."""
    names = {path.partition(":")[2].rpartition(".")[2] for family in seams.SEAMS for path in paths_of(family)}
    root, unknown, known = source_of("sglang").parent, [], set()
    for path in [*(root / "srt").rglob("*.py"), *(root / "kernels" / "ops").rglob("*.py")]:
        text = path.read_text()
        if not any(name in text for name in names):
            continue
        at = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for function, node in functions(ast.parse(text)):
            used = {read.rpartition(".")[2] for read in reads(node)} & names
            served = {read for name, where, read in seams.CALL_SITES if (name, where) == (at, function)}
            left = (
                used
                - {read.rpartition(".")[2].removeprefix("_") for read in served}
                - {read.rpartition(".")[2] for read in served}
            )
            excuse = {at, f"{at}:{function}"} & ELSEWHERE.keys()
            known |= excuse if left else set()
            if left and not excuse:
                unknown.append((at, function, left))
    assert not unknown, "\n".join(map(str, unknown))
    assert ELSEWHERE.keys() == known


def test_everything_is_replaced_by_sglangs_registry(served):
    for path, before in served.before.items():
        assert find(path).value is not before, path
        assert find(path).value.__wrapped__ is before, path


def test_copies_of_functions_in_other_modules_are_replaced(served):
    """`from X import Y` makes a second reference to Y. SGLang's registry replaces it too."""
    utils = module(seams.UTILS)
    for name in (
        "resolve_fp8_mqa_logits_fn",
        "resolve_fp8_paged_mqa_logits_fn",
        "resolve_paged_mqa_logits_metadata_fn",
    ):
        assert getattr(module(seams.INDEXER), name) is getattr(utils, name)
    assert module(seams.BACKEND).resolve_paged_mqa_logits_metadata_fn is utils.resolve_paged_mqa_logits_metadata_fn
    assert utils.resolve_fp8_mqa_logits_fn() is adapters.fp8_mqa_logits
    assert utils.resolve_fp8_paged_mqa_logits_fn() is adapters.fp8_paged_mqa_logits
    assert utils.resolve_paged_mqa_logits_metadata_fn() is adapters.get_paged_mqa_logits_metadata
    for name in ("topk_transform_paged", "topk_transform_paged_v2"):
        assert getattr(module(seams.V4_INDEXER), name) is getattr(module(seams.V4_TOPK), name)


def test_again_in_the_same_process(served):
    after = {path: find(path).value for path in served.before}
    plugin.register()
    module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    assert {path: find(path).value for path in served.before} == after
