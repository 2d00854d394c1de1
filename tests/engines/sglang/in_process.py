"""The plugin in SGLang itself: its .py files, with stand-ins for what is not installed, on the CPU.

tests/engines/sglang/test_files.py runs this in a process of its own."""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import textwrap
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# These look for what is installed when they are imported, so they come before the stand-ins.
import torch._dynamo
import torch._inductor.compile_fx
import transformers
import tvm_ffi
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PretrainedConfig  # noqa: F401

from dsa import backends
from dsa_engines.replacements import find
from dsa_engines.sglang import adapters, hooks, plugin, seams, warm_up
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, E4M3, INT32, PAGE, int32
from tests.engines.sglang.stand_ins import stand_in

assert transformers and tvm_ffi
DEEP_GEMM = next((f for p in sys.path if (f := Path(p) / "deep_gemm" / "__init__.py").exists()), None)
PEER_FUNCTIONS = [path.partition(":")[2] for path in seams.SIGNATURES if path.startswith("deep_gemm:")]


def deep_gemm_module():
    """sgl-deep-gemm without its library: the functions of its file that the plugin replaces, which cannot run."""
    module = types.ModuleType("deep_gemm")
    module.get_num_sms = lambda: 132
    for node in ast.walk(ast.parse(DEEP_GEMM.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in PEER_FUNCTIONS:
            space = {"torch": torch}
            exec(ast.unparse(node), space)
            setattr(module, node.name, space[node.name])
    return module


@pytest.fixture(scope="module", autouse=True)
def engine():
    """SGLang as it is after its own `load_plugins`, in a process where the plugin is on."""
    stand_in("sglang", "deep_gemm")
    sys.modules["deep_gemm"] = deep_gemm_module()
    plugins = importlib.import_module("sglang.srt.plugins")
    entry = EntryPoint("dsa", "dsa_engines.sglang:register", "sglang.srt.plugins")
    patch = pytest.MonkeyPatch()
    patch.setenv("DSA_ENGINE", "1")
    patch.delenv("DSA_ENGINE_OPS", raising=False)
    patch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])
    patch.setattr(backends, "why_no_kernels", lambda: None)
    patch.setattr(warm_up, "decoding_batches", lambda num_sms: [1])
    plugins.load_plugins()
    yield
    patch.undo()


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


@pytest.fixture(scope="module")
def served(engine):
    """Both backends made by SGLang's registry; their constructors, which need a GPU, are left out."""
    before = {path: find(path).value for family in seams.SEAMS for path in paths_of(family)}
    creators = module(plugin.REGISTRY).ATTENTION_BACKENDS
    patch = pytest.MonkeyPatch()
    context = module(plugin.PARALLEL.partition(":")[0])
    patch.setattr(context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=8))
    patch.setattr(context, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=3))
    v4_pool = SimpleNamespace(
        get_swa_key_layout=lambda: module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4,
        get_swa_key_bytes_per_token=lambda: 584,
    )
    patch.setattr(module(seams.BACKEND).DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    patch.setattr(module(V4_MAKER), "create_deepseek_v4_attn_backend", lambda runner: "a V4 backend")
    backend = creators["nsa"](runner_of(V32_POOL))
    assert creators["dsv4"](runner_of(v4_pool)) == "a V4 backend"
    patch.undo()
    assert plugin._decided == {"dsa": True, "dsv4": True}
    backend.token_to_kv_pool, backend.physical_page_size, backend.kv_cache_dim = V32_POOL, PAGE, 656
    backend.num_splits, backend.speculative_num_draft_tokens, backend.dsa_index_topk = 0, 3, 16
    return SimpleNamespace(before=before, backend=backend)


def paths_of(family):
    return [path for makers in seams.SEAMS[family].values() for path in makers]


def test_loading_plugins_imports_no_backend(engine):
    """In SGLang's other processes the plugin costs next to nothing."""
    loaded = sys.modules.keys()
    assert not {seams.BACKEND, seams.V4_BACKEND, seams.V4_MODEL, seams.FLASH_MLA} & loaded
    creators = module(plugin.REGISTRY).ATTENTION_BACKENDS
    assert {name: creators[name].dsa_family for name in plugin.FAMILIES} == plugin.FAMILIES


@pytest.mark.parametrize("path", seams.SIGNATURES)
def test_signatures(path):
    attribute = find(path)
    assert list(inspect.signature(getattr(attribute.owner, attribute.name)).parameters) == seams.SIGNATURES[path]


def source_of(name):
    return Path(importlib.util.find_spec(name).origin)


def functions(tree, prefix=""):
    """(Class.name, node) of a module's functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def reads(node):
    """What a function reads, "name" and "object.name", and what it imports, "module.name"; names as they were before
    `as`."""
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
def test_call_sites(name, function, read):
    found = dict(functions(ast.parse(source_of(name).read_text())))
    assert read in reads(found[function])


# Other modules and functions of SGLang's that read what is replaced: of models that are not served and of other GPUs,
# and what is replaced itself.
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


def test_no_other_function_reads_what_is_replaced():
    """A reader that is neither served nor known would get a hook that it was not tested with."""
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
    """`from X import Y` binds a name of its own, which SGLang's registry rebinds."""
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


def index_cache(count):
    """(cache [pages, 64 * 132] uint8, k, its scales) of so many pages."""
    k, k_scale = batches.index_keys(count * PAGE)
    cache = torch.cat([k.view(torch.uint8).view(count, -1), k_scale.view(count, PAGE).view(torch.uint8)], 1)
    return cache, k, k_scale


def indexer_of(served, pool, monkeypatch):
    """SGLang's indexer without its weights, as on a CUDA GPU."""
    indexer = module(seams.INDEXER)
    paged = module("sglang.kernels.ops.attention.dsa.paged_mqa_logits")
    for name in ("deepgemm_paged_mqa_logits_native", "deepgemm_paged_mqa_logits_split"):
        monkeypatch.setattr(indexer, name, getattr(paged, name))
    monkeypatch.setattr(indexer, "_is_cuda", True)
    monkeypatch.setattr(indexer, "get_token_to_kv_pool", lambda: pool)
    made = indexer.Indexer.__new__(indexer.Indexer)
    torch.nn.Module.__init__(made)
    made.paged_mqa_logits_backend = module(
        "sglang.srt.layers.attention.dsa.paged_mqa_logits_backend"
    ).DSAPagedMQALogitsBackend.DEEPGEMM
    made.sm_count, made.n_heads, made.index_topk, made.num_init_tokens, made.num_local_tokens = 3, 32, 16, 0, 0
    made.logits_with_pp_recv = False
    return made


def metadata_of(served, method, **more):
    """SGLang's metadata of a batch for its indexer."""
    topk = module(seams.TOPK)
    common = {"page_size": PAGE, "page_table_1": None, "token_to_batch_idx": None, "topk_indices_offset": None}
    attention = SimpleNamespace(**common | {"cu_seqlens_q": None, "indexer_logical_page_table": None} | more)
    return module(seams.METADATA).DSAIndexerMetadata(
        attn_metadata=attention,
        topk_transform_method=topk.TopkTransformMethod[method],
        topk_backend=topk.DSATopKBackend.SGL_KERNEL,
        paged_mqa_ctx_lens_2d=more.get("context_lens"),
    )


def mode(name):
    return module("sglang.srt.model_executor.forward_batch_info").ForwardMode[name]


def expected_slots(q, weights, k, k_scale, table, visible):
    """Cache slots of the 16 best keys of each token, those of token t in table[t]."""
    rows = []
    for t, length in enumerate(visible):
        slots = batches.slots_of(table, t, length)
        row = batches.index_scores(q[t : t + 1], k[slots], k_scale[slots], weights[t : t + 1])[0].float()
        rows.append([-1 if s < 0 else slots[s].item() for s in batches.selected(row, 16)])
    return rows


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_sglangs_indexer_decodes_and_verifies(served, next_n, monkeypatch):
    """`Indexer._get_topk_paged` of more sequences than it takes at once, and of drafts: one call a sequence."""
    lengths = [5, 64, 0, 130, 200] if next_n == 1 else [5, 64, 130, 200]
    table, pages = batches.paged(lengths)
    cache, k, k_scale = index_cache(pages)
    pool = SimpleNamespace(index_page_size=PAGE, get_index_k_with_scale_buffer=lambda layer_id: cache)
    indexer = indexer_of(served, pool, monkeypatch)
    visible = [max(n - next_n + 1 + i, 0) for n in lengths for i in range(next_n)]
    table = table.repeat_interleave(next_n, 0)
    q, weights = torch.randn(len(visible), 32, 128).to(E4M3), torch.randn(len(visible), 32)
    forward = mode("DECODE" if next_n == 1 else "TARGET_VERIFY")
    served.backend.speculative_num_draft_tokens = next_n
    context_lens = served.backend._build_paged_mqa_schedule_2d_ctx_lens(
        forward_mode=forward,
        cache_seqlens_int32=int32(lengths),
        seqlens_expanded=int32(visible),
        batch_size=len(lengths),
    )
    assert context_lens.shape == (len(lengths), next_n)
    metadata = metadata_of(
        served,
        "PAGED",
        real_page_table=table,
        context_lens=context_lens,
        cache_seqlens_int32=int32(lengths),
        dsa_seqlens_expanded=int32(visible),
        dsa_extend_seq_lens_list=[next_n] * len(lengths),
    )
    calls, scores = [], adapters.fp8_paged_mqa_logits

    def record(q, *given, **more):
        calls.append(q.shape)
        return scores(q, *given, **more)

    monkeypatch.setattr(module(seams.INDEXER), "resolve_fp8_paged_mqa_logits_fn", lambda: record)
    batch = SimpleNamespace(forward_mode=forward)
    got = indexer._get_topk_paged(batch, 0, q, weights.unsqueeze(2), metadata)
    assert got.tolist() == expected_slots(q, weights, k, k_scale, table, visible)
    assert calls == [(n, next_n, 32, 128) for n in ((3, 2) if next_n == 1 else (3, 1))]


def without_device_index(function):
    """`Indexer._get_topk_ragged` without its assertion that the device has an index, which a CPU has not."""
    source = textwrap.dedent(inspect.getsource(function))
    changed = source.replace("assert device_index is not None", "assert device_index is None")
    assert changed != source
    space = {}
    exec(changed, vars(module(seams.INDEXER)) | {}, space)
    return space[function.__name__]


@pytest.mark.parametrize("method", ["PAGED", "RAGGED"])
@pytest.mark.parametrize("chunked", [False, True])
def test_sglangs_indexer_prefills(served, method, chunked, monkeypatch):
    """`Indexer._get_topk_ragged`, whole and in chunks of rows, over keys that SGLang has gathered."""
    prefixes, lengths = [0, 30, 5], [4, 36, 9]
    owners = [b for b, (p, n) in enumerate(zip(prefixes, lengths)) for _ in range(p, n)]
    visible = [s + 1 for p, n in zip(prefixes, lengths) for s in range(p, n)]
    starts = int32([sum(lengths[:b]) for b in owners])
    table, _ = batches.paged(lengths)
    k, k_scale = batches.index_keys(sum(lengths))
    gathered = k.view(torch.uint8), k_scale.view(torch.uint8).view(-1, 4)
    pool = SimpleNamespace(index_page_size=PAGE, get_index_k_scale_buffer=lambda *given: gathered)
    indexer = indexer_of(served, pool, monkeypatch)
    indexer.__dict__["_with_real_sm_count"] = contextlib.nullcontext
    indexer.__dict__["_get_mqa_logits_budget_bytes"] = lambda device: 0
    budget = 5 * sum(lengths) * indexer._MQA_LOGITS_BYTES_PER_ELEM
    monkeypatch.setattr(module(seams.INDEXER), "mqa_logits_should_chunk", lambda **given: (chunked, budget))
    metadata = metadata_of(
        served,
        method,
        real_page_table=table,
        indexer_k_start_end=(starts, starts + int32(visible)),
        indexer_seq_lens_cpu=torch.tensor(lengths),
        indexer_seq_lens=int32(lengths),
        dsa_seqlens_expanded=int32(visible),
        token_to_batch_idx=int32(owners),
        topk_indices_offset=starts if method == "RAGGED" else None,
    )
    q, weights = torch.randn(len(owners) + 2, 32, 128).to(E4M3), torch.randn(len(owners) + 2, 32)
    batch = SimpleNamespace(forward_mode=mode("EXTEND"), seq_lens_cpu=lengths, extend_seq_lens_cpu=lengths)
    run = without_device_index(type(indexer)._get_topk_ragged)
    got = run(indexer, False, batch, 0, q, weights.unsqueeze(2), metadata)
    for t, (owner, begin, n) in enumerate(zip(owners, starts.tolist(), visible)):
        part = slice(begin, begin + n)
        row = batches.index_scores(q[t : t + 1], k[part], k_scale[part], weights[t : t + 1])[0].float()
        slots = batches.slots_of(table, owner, n).tolist()
        places = slots if method == "PAGED" else range(begin, begin + n)
        assert got[t].tolist() == [-1 if s < 0 else places[s] for s in batches.selected(row, 16)]
    assert (got[len(owners) :] == -1).all()  # padding


@pytest.mark.parametrize("method", ["PAGED", "RAGGED"])
def test_sglangs_metadata_selects_all_keys_without_scores(served, method):
    """What `Indexer._forward_cuda_k_only` asks for."""
    lengths, owners = int32([1, 2, 1, 2, 3]), int32([0, 0, 1, 1, 1])
    table, _ = batches.paged([2, 3])
    offsets = int32([0, 0, 2, 2, 2])
    metadata = metadata_of(
        served,
        method,
        real_page_table=table,
        dsa_seqlens_expanded=lengths,
        token_to_batch_idx=owners,
        topk_indices_offset=offsets if method == "RAGGED" else None,
    )
    got = metadata.topk_transform(torch.zeros(5, 16), 16)
    for t, n in enumerate(lengths.tolist()):
        slots = batches.slots_of(table, owners[t], n).tolist()
        want = slots if method == "PAGED" else list(range(offsets[t], offsets[t] + n))
        assert got[t].tolist() == [*want, *[-1] * (16 - n)]


def test_sglangs_backend_attends(served):
    """The two methods and the plan, called as `forward_extend` and `forward_decode` call them."""
    backend = served.backend
    plan = backend._compute_flashmla_metadata(cache_seqlens=int32([16] * 8), seq_len_q=1)
    part = plan.slice(slice(0, 5))
    part.copy_(backend._compute_flashmla_metadata(cache_seqlens=int32([16] * 4), seq_len_q=1))
    cache, rows = batches.latent_cache(656, 3)
    q, table = torch.randn(4, 8, 576).to(BF16), torch.randint(0, 192, (4, 16), dtype=INT32)
    table[1, 5:] = -1
    metadata = SimpleNamespace(dsa_cache_seqlens_int32=int32([16, 5, 16, 16]), flashmla_metadata=part)
    got = backend._forward_flashmla_kv(
        q_all=q,
        kv_cache=cache.view(-1, 1, 656),
        sm_scale=0.1,
        v_head_dim=512,
        layer=SimpleNamespace(tp_q_head_num=8, head_dim=576),
        metadata=metadata,
        page_table_1=table,
    )
    want, *_ = batches.attention(q, rows, table, 0.1)
    assert (got.squeeze(1).double() - want).abs().max() < 2e-2
    kv = rows.to(BF16).unsqueeze(1)
    got = backend._forward_flashmla_sparse(
        q_all=q,
        kv_cache=kv,
        page_table_1=table,
        sm_scale=0.1,
        v_head_dim=512,
        topk_length=metadata.dsa_cache_seqlens_int32,
        attn_sink=None,
    )
    want, *_ = batches.attention(q, kv.squeeze(1), table, 0.1)
    assert (got.double() - want).abs().max() < 2e-2


def test_v4_scores_of_a_prompt(served):
    """`_nonpaged_mqa_logits`, which imports DeepGEMM at each call, with an empty range where all keys are selected."""
    k, k_scale = batches.index_keys(70)
    q, weights = torch.randn(3, 64, 128).to(E4M3), torch.randn(3, 64)
    plan = SimpleNamespace(ks=int32([0, 0, 0]), ke=int32([0, 40, 70]), max_seqlen_k=128)
    mixin = module(seams.V4_INDEXER).C4IndexerBackendMixin
    given = {"q_indexer": q, "weights": weights, "kv": (k, k_scale), "plan": plan, "rows": slice(0, 3)}
    logits = mixin._nonpaged_mqa_logits(**given)
    out, raw = (torch.full((3, 16), 7, dtype=INT32) for _ in range(2))
    table, lengths = torch.arange(6, dtype=INT32).view(3, 2), int32([9, 40, 70])
    module(seams.V4_INDEXER).topk_transform_paged_v2(logits, lengths, table, out, PAGE, None, raw)
    want = batches.index_scores(q, k, k_scale, weights).float()
    assert raw[0].tolist() == [*range(9), *[-1] * 7]
    for t in (1, 2):
        assert raw[t].tolist() == batches.selected(want[t, : lengths[t]], 16)
    assert torch.equal(out[:2], torch.where(raw < 0, -1, raw + 2 * PAGE * torch.arange(3)[:, None]).int()[:2])


def test_v4_plans_and_scores_of_pages_are_read_at_each_call(served):
    """`from deep_gemm import ...` inside functions gives the hooks."""
    from deep_gemm import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

    lengths, table = int32([[5], [70]]), int32([[0, 2], [1, 3]])
    cache, k, k_scale = index_cache(4)
    plan = get_paged_mqa_logits_metadata(lengths, PAGE, 132)
    q, weights = torch.randn(2, 1, 64, 128).to(E4M3), torch.randn(2, 64)
    logits = fp8_paged_mqa_logits(q, cache.view(4, PAGE, 1, 132), weights, lengths, table, plan, 128, False)
    for b, length in enumerate((5, 70)):
        slots = batches.slots_of(table, b, length)
        want = batches.index_scores(q[b], k[slots], k_scale[slots], weights[b : b + 1])[0]
        assert torch.allclose(logits[b, :length].double(), want, atol=1e-3)


def test_v4_attention_through_what_its_constructor_binds(served):
    """The backend keeps a partial of the function that its module has when it is made."""
    interface = module(seams.FLASH_MLA)
    cache, rows = batches.latent_cache(584, 2)
    q, indices = torch.randn(3, 1, 8, 512).to(BF16), torch.randint(0, 128, (3, 1, 64), dtype=INT32)
    call = functools.partial(interface.flash_mla_with_kvcache, use_legacy=True)
    plan = interface.FlashMLASchedMeta()
    options = {"is_fp8_kvcache": True, "topk_length": int32([64] * 3), "attn_sink": torch.zeros(8)}
    out, _ = call(q, cache, None, None, 512, plan, softmax_scale=0.04, indices=indices, **options)
    want, *_ = batches.attention(q.squeeze(1), rows, indices.squeeze(1), 0.04, torch.zeros(8))
    assert (out.squeeze(1).double() - want).abs().max() < 2e-2
    assert interface.flash_mla_sparse_fwd.__wrapped__ is served.before[f"{seams.FLASH_MLA}:flash_mla_sparse_fwd"]
    attention = SimpleNamespace(attn_tp_size=8, n_local_heads=16)
    assert module(seams.V4_MODEL).MqaAttentionBase._kernel_num_heads(attention, 5) == 16
    assert hooks.kernel_num_heads(None, attention, 5) == 16
