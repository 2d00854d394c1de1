"""The whole-model benchmark's rows as a table, CSV, picture and document, and the peers' ops in their places."""

import csv
import json
import sys
import types

import pytest
import torch

import dsa
from dsa.reference.mla import mha_varlen_fwd as reference
from dsa.testing import calc_diff
from dsa_bench.e2e import peer_experts, plot, report, stacks, table
from dsa_bench.e2e import peers as peer_ops
from dsa_bench.e2e.parts import PARTS
from dsa_bench.e2e.peer_experts import Slots, padded
from dsa_bench.e2e.runs import Run, decode, prefill
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.command.main import main
from dsa_layers.layers import attention, key_selection
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.attention_form import HeadSizes
from dsa_layers.layers.experts import Experts
from tests.bench import peer_stubs
from tests.bench.small_stacks import FEWER, SMALL

PARTS_MS = dict(zip(PARTS, (0.5, 0.25, 2.0, 4.0, 0.25)))
ROW = {"shape": "V3.2 decode 8 x 4096", "model": "V3.2", "run": "decode 8 x 4096", "tokens": 8, "ms": 8.0}
ROW |= {"tokens/s": 1000.0, "parts": PARTS_MS}
ALONE = ROW | {"peer_ms": None, "ratio": None, "peer_parts": None, "peers": [], "failed": {}}
BESIDE = ROW | {"peer_ms": 10.0, "ratio": 1.25, "peer_parts": PARTS_MS | {"top-k": 1.0}}
BESIDE |= {"peers": ["deepgemm 2.8.1", "vllm"], "failed": {}}


def test_lines():
    assert table.head().index("tokens/s") < table.head().index("indexer")
    assert " 1000 |" in table.line(ALONE) and table.line(ALONE).endswith("no peer")
    assert table.line(ALONE | {"failed": {"vllm": "failed: no"}}).endswith("no peer; vllm failed: no")
    assert table.line(BESIDE).endswith("1.25 (indexer 1.00, top-k 4.00, attention 1.00; deepgemm 2.8.1, vllm)")


def test_csv_and_picture(tmp_path):
    table.write_csv([ALONE, BESIDE], tmp_path / "rows.csv")
    alone, beside = csv.DictReader((tmp_path / "rows.csv").open())
    assert float(beside["peers' top-k ms"]) == 1.0 and alone["peers' top-k ms"] == alone["peers' ms"] == ""
    assert float(alone["MoE ms"]) == 4.0 and float(alone["tokens/s"]) == 1000.0
    plot.write_passes([ALONE, BESIDE, BESIDE | {"model": "V4-Flash"}], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_cut():
    assert plot.widths(PARTS_MS, 7.0) == pytest.approx([ms / 7 for ms in PARTS_MS.values()])
    assert plot.widths(PARTS_MS | {"MoE": 700.0}, 7.0) == pytest.approx(
        [1 / 14, 1 / 28, 2 / 7, plot.LONGEST - 11 / 28, 0]
    )


def current():
    names = ("topk_indices", "mha_varlen_fwd", *(name for _, ops in peer_ops._GROUPS for name in ops))
    ops = {name: getattr(dsa, name) for name in names}
    return ops | {
        "form": attention.multi_head_is_faster,
        "Experts": Experts.forward,
        "many keys": key_selection.FUSED_KEYS,
    }


def test_peers_take_the_ops_places_and_give_them_back(peers):
    ours, lengths = current(), ([4096], [4096], 2048, HeadSizes(128, 128, 64, 128, 512))
    assert attention.multi_head_is_faster(*lengths)
    with pytest.raises(KeyError), peer_ops.peer_kernels() as replaced:
        assert not attention.multi_head_is_faster(*lengths)  # selected keys are attended to in the absorbed form
        assert {*replaced.ops, "form", "many keys"} == ours.keys() | {"FP4 experts"} and replaced.failed == {}
        assert replaced.libraries == ["deepgemm 2.8.1", "sgl-flash-mla", "torch", "vllm"]
        assert all(op is not ours[name] for name, op in current().items())
        raise KeyError
    assert current() == ours


def test_older_builds_stand_in_for_newer_ones(peers, monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("raise OSError('libcuda')")
    third_party = types.ModuleType("vllm.third_party")
    third_party.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "vllm.third_party", third_party)
    monkeypatch.delitem(sys.modules, "vllm.third_party.deep_gemm")
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    with peer_ops.peer_kernels() as replaced:
        assert replaced.libraries == ["deepgemm", "flashmla", "torch", "vllm"]
        assert replaced.failed == {"deepgemm 2.8.1": "failed: libcuda"}


def test_without_peers_nothing_is_replaced(no_peers):
    ours = current()
    with peer_ops.peer_kernels() as replaced:
        assert current() == ours and not replaced.ops and not replaced.failed


@pytest.fixture(params=["newest", "older"])
def either_build(request, peers, monkeypatch):
    if request.param == "older":
        for name in ("vllm.third_party.deep_gemm", "flash_mla"):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=["vLLM's", "ours"])
def either_top_k(request, installed):
    """vLLM's, or ours where its library is not there."""
    if request.param == "ours":
        (installed / "vllm/_C_stable_libtorch.abi3.so").unlink()


def same_with_peers(call):
    """Asserts that the call gives the same numbers with the peers' kernels, or nearly."""
    expected = call()
    with peer_ops.peer_kernels():
        got = call()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def calls_of(monkeypatch, owner, name):
    """The positional arguments of the calls from now on of this function, which stays what it is."""
    calls, function = [], getattr(owner, name)

    def noted(*given, **options):
        calls.append(given)
        return function(*given, **options)

    monkeypatch.setattr(owner, name, noted)
    return calls


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("paged", "most"), [(False, 0), (True, 7)])
def test_selections_of_packed_sequences(paged, most, either_build, either_top_k):
    """DeepGEMM 2.8.1's rows begin at their first key, which the selection knows, whoever selects."""
    q, kv, weights = fp8(12, 32, 32), (fp8(48, 32), torch.rand(48) + 0.5), torch.rand(12, 32)
    sequences = torch.arange(12) % 3
    starts = torch.tensor([0, 7, 31], dtype=torch.int32)[sequences]
    lengths = torch.full((12,), 5, dtype=torch.int32)
    paging = {}
    if paged:
        table = torch.randperm(6, dtype=torch.int32).view(3, 2)
        paging = {"block_table": table, "page_size": 4, "row_to_seq": sequences.int()}

    def selected():
        options = {"clean_logits": False, "max_seqlen_k": most}
        scores = dsa.fp8_mqa_logits(q, kv, weights, starts, starts + lengths, **options)
        begins = None if most else starts
        return dsa.topk_indices(scores, 3, starts=begins, lengths=lengths, **paging).sort(1).values

    same_with_peers(selected)


def test_selections_from_many_keys_are_no_op_of_ours(either_build, either_top_k, monkeypatch):
    """No peer selects as it scores: so many keys have the peers' scores and their selection, as fewer have."""
    keys, tokens = 60, 12
    monkeypatch.setattr(key_selection, "FUSED_KEYS", keys)
    monkeypatch.setattr(key_selection, "FUSED_TOKENS", tokens)
    fused = calls_of(monkeypatch, dsa, "indexer_select")
    q, kv, weights = fp8(tokens, 32, 32), (fp8(keys, 32), torch.rand(keys) + 0.5), torch.rand(tokens, 32)
    starts, lengths = torch.zeros(tokens, dtype=torch.int32), torch.arange(keys - tokens + 1, keys + 1).int()

    def selected():
        half = {"accumulators": torch.float16}
        return key_selection.select_packed(q, kv, weights, 3, starts, lengths, keys, **half).sort(1).values

    same_with_peers(selected)
    assert len(fused) == 1
    selected()
    assert len(fused) == 2


def test_selections_from_many_keys_stay_ours_without_a_peer_for_them(peers, installed, monkeypatch):
    """Here FlashMLA's attention alone is a peer's."""
    (installed / "vllm/_C_stable_libtorch.abi3.so").unlink()
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    ours = key_selection.FUSED_KEYS
    with peer_ops.peer_kernels() as replaced:
        assert "sgl-flash-mla" in replaced.libraries and key_selection.FUSED_KEYS == ours


def two_sequences():
    """(index pages, block table, lengths)"""
    pages = torch.zeros(4, 64, 1, 68, dtype=torch.uint8)
    dsa.write_indexer_cache(fp8(256, 64), torch.rand(256) + 0.5, pages, torch.arange(256))
    return pages, torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), torch.tensor([70, 128], dtype=torch.int32)


def test_selections_from_pages(either_build, either_top_k, monkeypatch):
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    q, weights, (pages, table, lengths) = fp8(2, 32, 64), torch.rand(2, 32), two_sequences()

    def selected():
        batch = DecodeBatch(table, 64, lengths, 128)
        return key_selection.select_paged(q, pages, table, weights, 8, lengths, batch, 128, 64).sort(1).values

    same_with_peers(selected)


def test_products(either_build):
    a = fp8(5, 256), torch.rand(5, 2) + 0.5
    b = fp8(192, 256), torch.rand(2, 2) + 0.5
    for dtype in (torch.bfloat16, torch.float32):  # the peers' have bf16 results alone
        same_with_peers(lambda dtype=dtype: dsa.fp8_gemm_nt(a, b, dtype))


def bf16(*shape):
    return torch.randn(shape, dtype=torch.bfloat16) / 10


def test_attention_to_selected_keys(either_build):
    q, kv, topk_indices = bf16(6, 64, 576), bf16(300, 1, 576), torch.randint(-1, 300, (6, 1, 128), dtype=torch.int32)
    same_with_peers(lambda: dsa.flash_mla_sparse_fwd(q, kv, topk_indices, 0.1, 512)[0])


def test_windows(either_build):
    q, kv, compressed, sink = bf16(140, 64, 512), bf16(140, 1, 512), bf16(40, 1, 512), torch.randn(64)
    ends = torch.tensor([0, 50, 140], dtype=torch.int32)
    near, topk_indices = dsa.window_indices(ends, ends, 140, 16), torch.randint(-1, 40, (140, 32), dtype=torch.int32)
    common = (q, kv, ends, ends, 16)
    same_with_peers(lambda: dsa.sliding_window_attention(*common, 0.05, 512, sink, indices=near))
    both = (*common, compressed, topk_indices, 0.05, 512, sink)
    same_with_peers(lambda: dsa.window_sparse_attention(*both, window_indices=near))
    angles = torch.rand(140, 32)
    cast = (angles.cos(), angles.sin(), 8, 0.05, sink)
    for entries in ((None, None), (compressed, topk_indices)):

        def blocks(entries=entries):
            values, scale = dsa.window_attention_cast_to_fp8(*common, *entries, *cast, window_indices=near)
            return values.float().unflatten(1, (-1, 128)) * scale[..., None]

        same_with_peers(blocks)


def flash_attention(q, k, v, cu_q, cu_k, most_q, most_k, dropout, causal, debug, *, scale):
    """Stands for PyTorch's, which a CPU does not have."""
    assert q.shape[1:] == k.shape[1:] == v.shape[1:] and (dropout, debug) == (0.0, False)
    assert most_q >= cu_q.diff().max() and most_k == cu_k.diff().max()
    return *reference.mha_varlen_fwd(q, k, v, cu_q, cu_k, most_k, scale, causal), None, None, None


@pytest.mark.parametrize("first", [2, 7])
def test_prompts_all_of_whose_keys_count(first, either_build, monkeypatch):
    """Of two lengths by FlashAttention, and of one by cuDNN's, for which PyTorch's own attention stands on a CPU."""
    monkeypatch.setattr(peer_ops, "_flash_attention", flash_attention)
    q, k, v, rope = bf16(first + 7, 2, 192), bf16(14, 2, 128), bf16(14, 2, 128), bf16(14, 64)
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, first, first + 7], [0, 7, 14]))
    same_with_peers(lambda: dsa.mha_varlen_fwd(q, k, v, cu_q, cu_k, 7, 0.1, k_rope=rope)[0])


@pytest.mark.parametrize(
    ("rows", "columns", "k", "prompt", "named"),
    [
        (2, 4096, 2048, False, "cooperative_topk"),
        (65, 4096, 512, False, "persistent_topk"),
        (65, 4096, 512, True, "top_k_per_row_prefill"),
        (65, 65536, 512, True, "persistent_topk"),
        (2, 4096, 100, False, "top_k_per_row_decode"),
    ],
)
def test_the_topk_of_vllms_that_is_the_fastest(rows, columns, k, prompt, named, peers, monkeypatch):
    scores = torch.rand(rows, columns).argsort(1).float()  # no ties within a row
    lengths = torch.full((rows,), columns, dtype=torch.int32)
    starts, options = (torch.zeros_like(lengths), {"starts": torch.zeros_like(lengths)}) if prompt else (None, {})
    if prompt:
        scores.begins, scores.at_zero = starts, True
    with peer_ops.peer_kernels():
        called = calls_of(monkeypatch, torch.ops._C, named)
        found = dsa.topk_indices(scores, k, lengths=lengths, **options)
    assert len(called) == 1 and torch.equal(found.long().sort().values, scores.topk(k).indices.sort().values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "either_build"),
    [("V3.2", "newest"), ("V3.2", "older"), ("V4-Flash", "newest")],
    indirect=["either_build"],
)
def test_whole_passes(name, either_build, monkeypatch):
    """Prompts, dense and sparse, and steps, on the peers' kernels: every call is one that they take, and the logits
    are ours, up to ties. Their attention is of bytes' layers, which have 64 heads and latents of 512."""
    monkeypatch.setattr(peer_ops, "_flash_attention", flash_attention)
    monkeypatch.setattr(DSAAttention, "_has_multi_head_kernel", lambda self, x: True)
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    monkeypatch.setattr(peer_experts, "LEAST_TOKENS", 100)
    monkeypatch.setattr(peer_experts, "LEAST_WIDENED", 100)
    own = {"num_attention_heads": 64, "index_topk": 128} | ({"num_key_value_heads": 64} if name == "V3.2" else {})
    model = stacks.stack(name, "cpu", **SMALL, **FEWER[name] | own)
    # The first prompts are longer than what is selected, and the second of them is cut.
    for run in (prefill(model, 2, 160, 200), prefill(model, 3, 40, 400), decode(model, 2, 300)):
        expected = run.launched()
        with peer_ops.peer_kernels():
            got = run.launched()
        assert calc_diff(got, expected) < 0.2
        assert torch.equal(run.launched(), expected)


@pytest.mark.parametrize(("limit", "fp4"), [(None, False), (0.5, True)])
def test_experts_of_prompts(limit, fp4, either_build, monkeypatch):
    experts = Experts(5, 256, 128, fp8=True, fp4=fp4, limit=limit)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(90)])  # and nobody chooses the last
    arguments = bf16(90, 256), chosen, torch.rand(90, 2), bf16(90, 256)
    expected, calls = experts(*arguments), calls_of(monkeypatch, peer_experts, "padded")
    with peer_ops.peer_kernels():
        experts(*arguments)
        assert not calls  # few
        monkeypatch.setattr(peer_experts, "LEAST_TOKENS", 90)
        monkeypatch.setattr(peer_experts, "LEAST_WIDENED", 90)
        got = experts(*arguments)
    assert len(calls) == 1 and calc_diff(got, expected) < 1e-4


@pytest.mark.parametrize(
    ("tokens", "fp4", "layouts"),
    [(3, False, (1, 0)), (4, False, (0, 1)), (128, False, (0, 1)), (3, True, (0, 0)), (128, True, (0, 0))],
)
def test_experts_of_steps(tokens, fp4, layouts, peers, monkeypatch):
    """layouts: how often rows are padded, and how often they are in slots. FP4 experts are on Marlin, which has
    neither, and activations in bf16."""
    experts = Experts(6, 256, 128, fp8=True, fp4=fp4, limit=0.5)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])  # and nobody chooses the last
    arguments = bf16(tokens, 256), chosen, torch.rand(tokens, 2), bf16(tokens, 256), bf16(tokens, 256)
    expected = experts(*arguments)
    padding, slots = calls_of(monkeypatch, peer_experts, "padded"), calls_of(monkeypatch, Slots, "of")
    with peer_ops.peer_kernels():
        got = experts(*arguments)
    assert (len(padding), len(slots)) == layouts
    assert calc_diff(got, expected) < (2e-3 if fp4 else 1e-4)


def test_steps_of_more_tokens_than_an_expert_has_room_for_are_ours(peers):
    experts = Experts(2, 256, 128, fp8=True)
    arguments = bf16(129, 256), torch.zeros(129, 1, dtype=torch.int64), torch.rand(129, 1)
    expected = experts(*arguments)
    with peer_ops.peer_kernels():
        assert torch.equal(experts(*arguments), expected)


def test_where_experts_rows_are():
    chosen = torch.tensor([[1, 3], [3, 1], [1, 0]])
    places, sources, groups = padded(chosen, 4)
    assert places.tolist() == [[128, 256], [257, 129], [130, 0]]
    assert [sources[i].item() for i in (0, 128, 129, 130, 256, 257)] == [2, 0, 1, 2, 0, 1]
    assert groups.view(-1, 128).unique(dim=1).flatten().tolist() == [0, 1, 3, -1, -1] and len(groups) == 5 * 128
    # Of few tokens there are few groups, however many experts there are.
    places, _, groups = padded(torch.tensor([[200, 3]]), 256)
    assert places.tolist() == [[128, 0]] and groups.view(-1, 128)[:, 0].tolist() == [3, 200]


def test_decoding_and_its_plans(either_build, monkeypatch):
    q, pages = bf16(2, 1, 64, 512), dsa.make_v4_cache(4, 64)
    dsa.write_kv_cache(bf16(256, 512), pages, torch.arange(256))
    indices = torch.randint(-1, 256, (2, 1, 64), dtype=torch.int32)
    extra = {"extra_k_cache": pages, "extra_indices_in_kvcache": indices.flip(0)}

    def decode(**options):
        common = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": torch.ones(64), "softmax_scale": 0.05}
        return dsa.flash_mla_with_kvcache(q, pages, None, None, 512, None, **common, **options)

    same_with_peers(decode)
    same_with_peers(lambda: decode(**extra))
    module = sys.modules["flash_mla"] or sys.modules["vllm.third_party.flashmla.flash_mla_interface"]
    made = calls_of(monkeypatch, module, "get_mla_metadata")
    with peer_ops.peer_kernels():
        for options in ({}, extra, {}, extra):
            decode(**options)
    assert len(made) == 2  # one for each kind of call


def test_dense_decoding_stays_ours(peers):
    q, pages = bf16(1, 1, 4, 576), bf16(2, 64, 1, 576)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
    same_with_peers(lambda: dsa.flash_mla_with_kvcache(q, pages, table, lengths, 512, dsa.get_mla_metadata()[0]))


class Machine:
    """Stands for a GPU and a model: a pass takes 2 ms, with the peers' kernels 3."""

    def __init__(self, monkeypatch):
        self.compiled, self.fails, self.peers_of_calls, self.theirs = [], None, [], torch.tensor([4.0, 5.5])
        self.passes = []  # launched or timed, with the peers' kernels
        monkeypatch.setattr(report, "stack", lambda name: torch.nn.Linear(1, 1))
        monkeypatch.setattr(report, "prefill", lambda model, count, tokens, chunk: self.run())
        monkeypatch.setattr(report, "decode", self.decode)
        monkeypatch.setattr(report, "bench", self.bench)
        monkeypatch.setattr(report, "gpu_ms", self.parts)
        monkeypatch.setattr(report, "linear_shapes", lambda model: [(256, 128)])
        monkeypatch.setattr(report, "compile_products", lambda shapes: self.compiled.extend(shapes))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def has_peers(self):
        return "e2e" in dsa.topk_indices.__module__

    def bench(self, calls, *, repeats):
        for call in calls.values():
            self.peers_of_calls.append(call is not calls["ms"] and bool(call().eq(self.theirs).all()))
        return dict(zip(calls, (2.0, 3.0)))

    def run(self):
        def logits(kind):
            if self.fails and self.has_peers():
                raise self.fails
            if self.has_peers():
                self.passes.append(kind)
            return self.theirs if self.has_peers() else torch.tensor([4.0, 5.0])

        return Run(lambda: logits("timed"), lambda: logits("launched"), self.run)

    def decode(self, model, count, context):
        if context == 64:
            raise torch.OutOfMemoryError("too much")
        return self.run()

    def parts(self, model, call):
        self.passes.append("parts of")
        call()
        return PARTS_MS


@pytest.mark.slow
def test_rows_leave_out_what_does_not_fit(monkeypatch, no_peers):
    """Every prompt and step gets a row but one for which the memory is short."""
    machine = Machine(monkeypatch)
    rows = list(report.rows(["V3.2"], prompts=[(1, 32), (3, 4000)], steps=[(1, 32), (2, 64)]))
    assert [(r["shape"], r["tokens"], r["ms"], r["tokens/s"], r["peer_ms"], r["peers"]) for r in rows] == [
        ("V3.2 prefill 32", 32, 2.0, 16000.0, None, []),
        ("V3.2 prefill 3 x 4000", 12000, 2.0, 6e6, None, []),
        ("V3.2 decode 1 x 32", 1, 2.0, 500.0, None, []),
    ]
    assert sorted(machine.compiled) == [(m, 256, 128) for m in (1, 2, 32, 3808, 8192)]


def test_rows_that_are_done_are_left_out(monkeypatch, no_peers):
    """And a model whose runs are all done is not made."""
    machine, made = Machine(monkeypatch), []
    monkeypatch.setattr(report, "stack", lambda name: made.append(name) or torch.nn.Linear(1, 1))
    choice = {"names": ["V3.2", "GLM-5"], "prompts": [(1, 32)], "steps": [(1, 32)]}
    done = ["V3.2 prefill 32", "V3.2 decode 1 x 32", "GLM-5 prefill 32"]
    assert [row["shape"] for row in report.rows(**choice, done=done)] == ["GLM-5 decode 1 x 32"]
    assert made == ["GLM-5"] and machine.compiled


def test_rows_beside_peers(monkeypatch, peers):
    """Both are timed by turns, each on its own kernels; what the peers do once is in no part."""
    machine = Machine(monkeypatch)
    (row,) = report.rows(["V4-Flash"], prompts=[(1, 32)], steps=[])
    assert json.loads(json.dumps(row)) == row and row["shape"] == "V4-Flash prefill 32"
    assert (row["peer_ms"], row["ratio"], row["peer_parts"]) == (3.0, 1.5, PARTS_MS)
    assert row["peer"] == "deepgemm 2.8.1, sgl-flash-mla, torch, vllm" and row["failed"] == {}
    assert row["difference"] == pytest.approx(calc_diff(torch.tensor([4.0, 5.5]), torch.tensor([4.0, 5.0])))
    assert machine.peers_of_calls == [False, True]
    assert machine.passes == ["launched", "timed", "parts of", "launched", "timed", "parts of"]  # the last is ours


@pytest.mark.parametrize("theirs", [[torch.nan, 1.0], [torch.inf, 1.0], [-5.0, 4.0]])
def test_a_peers_pass_of_something_else_has_no_time(theirs, monkeypatch, peers):
    Machine(monkeypatch).theirs = torch.tensor(theirs)
    (row,) = report.rows(["V3.2"], prompts=[], steps=[(1, 32)])
    assert (row["ms"], row["peer_ms"], row["ratio"], row["peers"], row["difference"]) == (2.0, None, None, [], None)
    assert row["failed"]["the pass"].startswith("failed: its logits differ by ")


def test_a_peer_that_fails_ends_no_other_run(monkeypatch, peers):
    machine = Machine(monkeypatch)
    machine.fails = RuntimeError("Unsupported h_q\nand more")
    rows = list(report.rows(["V3.2"], prompts=[(1, 32)], steps=[(1, 32)]))
    assert [(r["peer_ms"], r["ratio"], r["peer"], r["failed"]) for r in rows] == 2 * [
        (None, None, None, {"the pass": "failed: Unsupported h_q"})
    ]


def test_products_are_compiled_for_full_passes_and_their_rest():
    assert report._row_counts([(1, 4096), (2, 8192), (4, 3000)], [(8, 1)]) == {4096, 8192, 3808, 8}


def test_the_linear_layers_of_a_stack():
    shapes = stacks.linear_shapes(stacks.skeleton("V3.2"))
    # q_a_proj, the indexer's wk and kv_a_proj_with_mqa are one product; so are gate and up.
    assert {(2240, 7168), (36864, 7168), (7168, 16384)} < {*shapes} and not {(1536, 7168), (18432, 7168)} & {*shapes}
    assert all(channels % 128 == 0 for _, channels in shapes)


def test_the_command_needs_a_gpu(capsys):
    assert main(["bench", "e2e"]) == 2 and "needs a GPU with kernels" in capsys.readouterr().err
    assert main(["bench", "e2e", "--profile"]) == 2 and "--profile: is for one op" in capsys.readouterr().err
