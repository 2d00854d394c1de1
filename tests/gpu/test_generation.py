"""Generation (`dsa_layers.Generator`) on a GPU. Most tests compare with a CPU, where all ops run their references, or
with other options of the generator."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import dsa
from dsa.kernels.indexer import topk_indices_sm90
from dsa.kernels.indexer.limits import LENGTHS, PAGED
from dsa.ops.mla import flash_mla_with_kvcache
from dsa.reference import topk_indices as reference
from dsa.testing import assert_close, calc_diff
from dsa_layers.batch.sequence_batch import Chunk, SequenceBatch, prefill_batch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine import paged_attention, side_stream
from dsa_layers.engine.fuse import fuse
from dsa_layers.generation import steps as generation
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampler import sample
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.steps import DecodeStep
from dsa_layers.io.loading import load_model
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from dsa_layers.tiny import write_tiny_checkpoint
from tests.gpu import tiny_model
from tests.gpu.batch_invariant_tokens import assert_batch_invariant
from tests.gpu.launched_ops import launched_ops
from tests.layers.generation.guesses import Guesses, guess

pytestmark = pytest.mark.filterwarnings("ignore:.*has no Hopper kernel yet")
PROMPTS = [list(range(100, 250)), [7, 8, 9]]
FAMILIES = ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"]
# None of the others has batch-invariant kernels.
ALL = [*FAMILIES, "axk2", "dots3_note", "glm5_next", "hy_v4", "mistral_large4"]
# {weights: limit}. Where CPU and GPU first choose different tokens, the CPU's logits of the two must differ by less.
# The logits' standard deviation is 2. An e4m3 number that is rounded the other way changes by 1/16 to 1/8. This can
# change the experts that a router with random weights chooses.
NEAR_TIE = {"bf16": 1.0, "fp8": 4.0}


@pytest.fixture(scope="module")
def load_tiny(tmp_path_factory):
    """Return a function that loads the tiny model of a family, without end tokens."""
    root = tmp_path_factory.mktemp("families")
    for family in ALL:
        write_tiny_checkpoint(root / family, model=family)

    def load(family, device="cuda", **options):
        return without_end(load_model(root / family, device=device, progress=False, **options))

    return load


def without_end(model):
    model.config = replace(model.config, eos_token_ids=())
    return model


@pytest.mark.parametrize("family", ALL)
def test_greedy_tokens_equal_the_references(family, load_tiny):
    """In fp32 without quantisation, CPU and GPU differ only in the last bits."""
    tokens = []
    for device in ("cpu", "cuda"):
        model = load_tiny(family, device, dtype=torch.float32, dequantize=True)
        got = Generator(model, cache_tokens=1024).generate(PROMPTS, SamplingParams(max_tokens=16))
        tokens.append([c.tokens for c in got])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_with_drafts_are_those_without(family, drafts, load_tiny):
    """In fp32, rounding does not change a token. A model with random weights accepts very few drafts, so nearly all are
    rolled back."""
    model = load_tiny(family, dtype=torch.float32, dequantize=True, drafter=True)
    plain, drafted = (
        [c.tokens for c in Generator(model, cache_tokens=1024, draft_tokens=n).generate(PROMPTS, SamplingParams(24))]
        for n in (0, drafts)
    )
    assert drafted == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_shared_prefixes(family, load_tiny):
    """In fp32, rounding does not change a token. Prompts share prefixes within a call and with the previous call. Some
    sequences decode while the prompts of others are prefilled in chunks."""
    model = load_tiny(family, dtype=torch.float32, dequantize=True, drafter=True)
    text = [2 + i * i % 2000 for i in range(600)]
    prompts = [text, [*text[:570], 5, 6], [7, 8], text[:560]]
    sizes = {"cache_tokens": 4096, "prefill_chunk": 200, "draft_tokens": 2}
    expected = [c.tokens for c in Generator(model, **sizes).generate(prompts, SamplingParams(16))]
    shared = Generator(model, prefix_cache=True, **sizes)
    for least in (2, 3):
        assert [c.tokens for c in shared.generate(prompts, SamplingParams(16))] == expected
        assert shared.throughput.reused_tokens >= least * 512


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_in_the_published_mode(family, drafts, load_tiny, monkeypatch):
    """In the published mode weights, activations and caches are FP8. In a CUDA graph two chains of kernels run at the
    same time. `Guesses` makes most drafts right."""
    model = load_tiny(family, drafter=True)
    params = SamplingParams(96)
    truth = [c.tokens for c in Generator(model, cache_tokens=1024).generate(PROMPTS, params)]
    tokens, taken, found = [], [], []
    for graphs in (True, False):
        generator = Generator(model, cache_tokens=1024, draft_tokens=drafts, cuda_graphs=graphs)
        with monkeypatch.context() as patch:
            found.append(guess(patch, Guesses(truth, drafts)))
            tokens.append([c.tokens for c in generator.generate(PROMPTS, params)])
        taken.append(generator.throughput.taken)
    assert tokens[0] == tokens[1] and all(len(own) == 96 for own in tokens[0])
    assert found[0] == found[1] and taken[0] == taken[1]
    assert (taken[0] > 0) == (drafts > 0)


@pytest.mark.parametrize("kv_cache", ["fp8", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_invariant_tokens(family, kv_cache, load_tiny, monkeypatch):
    """Some sequences are longer than the 128 keys that are selected and than V4's window. Most drafts are right, but
    not all."""
    model = load_tiny(family, drafter=True, kv_cache=kv_cache)
    assert_batch_invariant(model, monkeypatch)


# Family -> (most kernels per layer of the tiny model, most kernels around the layers). Some scales of the tiny model
# have rows that are not a multiple of 16 bytes. PyTorch pads each with two kernels. Published models do not need this.
KERNELS = {"deepseek_v32": (37, 20), "glm_moe_dsa": (34, 20), "deepseek_v4": (52, 40)}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_a_graph(family, load_tiny, monkeypatch):
    """tests/layers/compilation/test_launches.py counts ops and PyTorch operators without a GPU. Here the count is
    larger, because some of them launch more than one kernel. The step must also run more branches on a second stream
    than it has layers."""
    forks, made = [], side_stream.SideStream

    def fork(*of_second_stream):
        forks.extend(of_second_stream[:1])
        return made(*of_second_stream)

    monkeypatch.setattr(side_stream, "SideStream", fork)
    model = load_tiny(family)
    generator = Generator(model, cache_tokens=1024)
    generator.generate(PROMPTS, SamplingParams(8))
    ((_, graph, _),) = generator.passes._decode._graphs.values()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    layers, (most, around) = model.config.num_hidden_layers, KERNELS[family]
    print(f"{family}: {len(names)} kernels in {layers} layers")
    assert len(forks) > layers
    assert 20 * layers < len(names) <= most * layers + around, "\n".join(names)


def mixtures():
    torch.manual_seed(0)
    made = [MoE(1024, 512, GroupedSigmoidRouter(1024, 8, 2, dtype=torch.bfloat16), dtype=torch.bfloat16) for _ in "ab"]
    return [moe.cuda() for moe in made]


@torch.no_grad()
def test_branches_of_two_streams_in_one_graph():
    """Two layers run on two streams, as for two parts of a batch, and each runs its shared expert on a further stream.
    A shared expert must not reuse the other layer's memory, even if the first layer's experts are late."""
    layers, x = [fuse(layer) for layer in mixtures()], torch.randn(16, 1024, device="cuda").bfloat16()
    expected = [layer(x) for layer in layers]
    outputs = layers[0].experts.outputs
    layers[0].experts.outputs = lambda *arguments: (torch.cuda._sleep(2_000_000), outputs(*arguments))[1]
    streams, graph, found = [torch.cuda.Stream() for _ in layers], torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for layer, stream in zip(layers, streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                found.append(layer(x))
        for stream in streams:
            main.wait_stream(stream)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_captured_gradients_of_experts():
    layer, x = mixtures()[0], torch.randn(16, 1024, device="cuda").bfloat16().requires_grad_()
    # backward() would make the node of x that accumulates gradients, and this node would remember the current stream.
    # The capture below would then wait for this stream, which is not allowed.
    (expected,) = torch.autograd.grad(layer(x).float().square().sum(), x)
    captured = torch.cuda.make_graphed_callables(layer, (torch.randn_like(x, requires_grad=True),))
    for _ in range(5):
        x.grad = None
        captured(x).float().square().sum().backward()
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("weights", NEAR_TIE)
@pytest.mark.parametrize("family", ALL)
def test_where_greedy_tokens_part_from_the_references(family, weights, load_tiny, monkeypatch):
    """Rounding can decide between two tokens with similar logits. Here the routers ignore the tokens, because rounding
    could also decide between two experts of a random router, and change the logits much more."""
    sample, noted = generation.sample, []
    monkeypatch.setattr(generation, "sample", lambda logits, *rest: (noted.append(logits), sample(logits, *rest))[1])
    tokens = []
    for device in ("cpu", "cuda"):
        model = load_tiny(family, device, dtype=torch.bfloat16, dequantize=weights == "bf16")
        for module in model.modules():
            if isinstance(module, GroupedSigmoidRouter | SqrtSoftplusRouter):
                module.weight.zero_()
        got = Generator(model, cache_tokens=1024).generate(PROMPTS, SamplingParams(16))
        tokens.append([c.tokens for c in got])
    for i, (own, other) in enumerate(zip(*tokens)):
        n = next((n for n in range(16) if own[n] != other[n]), None)
        if n is not None:
            logits = noted[n][i, 0]
            gap = (logits[own[n]] - logits[other[n]]).item()
            print(f"{family}, {weights}: token {n} of 16, gap {gap:.3f}, logits' deviation {logits.std():.2f}")
            assert 0 <= gap < NEAR_TIE[weights]


@pytest.mark.parametrize("multi_head", [True, False])
def test_the_published_mode_runs_its_kernels(multi_head, checkpoint, monkeypatch):
    """In the published mode the checkpoint's FP8 weights stay FP8. Index keys are in slots of 132 bytes, latents in
    slots of 656 bytes."""
    options, compiled = set(), topk_indices_sm90.compile_topk_indices

    def topk_spy(*variant):
        launch = compiled(*variant)
        return lambda *arguments: (options.add(arguments[-1]), launch(*arguments))

    launched = launched_ops(monkeypatch)
    monkeypatch.setattr(topk_indices_sm90, "compile_topk_indices", topk_spy)
    monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: multi_head)
    model = load_model(checkpoint, device="cuda", progress=False)
    completions = Generator(model, cache_tokens=512, prefill_chunk=64).generate(PROMPTS, SamplingParams(8))
    assert all(len(c.tokens) == 8 for c in completions)
    assert launched >= {
        *("quantize_indexer_queries", "write_indexer_keys", "read_indexer_cache", "fp8_mqa_logits"),
        *("get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits"),
        "topk_indices",
        *("write_mla_cache", "read_kv_cache", "flash_mla_with_kvcache"),
        *(("mha_varlen_fwd", "selection_bits") if multi_head else ("flash_mla_sparse_fwd",)),
    }
    # Decoding selects cache slots, which the top-k kernel itself looks up in the block table (PAGED).
    assert options == {LENGTHS, LENGTHS | PAGED}


def test_the_models_own_scores_are_selected_exactly(checkpoint, monkeypatch):
    shapes, topk = set(), dsa.topk_indices

    def checked(scores, k, **options):
        got = topk(scores, k, **options)
        assert torch.equal(got, reference(scores, k, **options))
        shapes.add((tuple(scores.shape), "block_table" in options))
        return got

    monkeypatch.setattr(dsa, "topk_indices", checked)
    model = load_model(checkpoint, device="cuda", progress=False)
    # A comparison cannot be captured, so passes run without graphs.
    generator = Generator(model, cache_tokens=1024, prefill_chunk=64, cuda_graphs=False)
    generator.generate([*PROMPTS, list(range(300, 530))], SamplingParams(8))
    assert len(shapes) > 3 and {paged for _, paged in shapes} == {False, True}


def test_dense_decoding_runs_its_kernel(checkpoint, monkeypatch):
    """Sequences shorter than the indexer's top-k attend to all keys. All layers of a pass share one plan."""
    calls, plans, decode, plan = [], [], dsa.flash_mla_with_kvcache, flash_mla_with_kvcache._mla_metadata

    def checked(q, k_cache, block_table, lengths, *arguments, **options):
        out, lse = decode(q, k_cache, block_table, lengths, *arguments, **options)
        with dsa.use_backend("reference"):
            expected, expected_lse = decode(q, k_cache, block_table, lengths, *arguments, **options)
        # The op's bounds on single numbers assume values of about 0.1, and the model has larger ones. So only
        # FlashMLA's bound on calc_diff is checked.
        assert calc_diff(out, expected) < 5e-6
        assert_close("lse", lse, expected_lse, abs_tol=1e-6, rel_tol=8.01 / 65536)
        calls.append(lengths.tolist())
        return out, lse

    monkeypatch.setattr(dsa, "flash_mla_with_kvcache", checked)
    monkeypatch.setattr(flash_mla_with_kvcache, "_mla_metadata", lambda *a: (plans.append(a), plan(*a))[1])
    model = load_model(checkpoint, device="cuda", dtype=torch.bfloat16, dequantize=True, progress=False)
    prompts = [[7, 8, 9], list(range(100, 130))]
    completions = Generator(model, cache_tokens=512).generate(prompts, SamplingParams(8))
    assert all(len(c.tokens) == 8 for c in completions)
    passes = [lengths for i, lengths in enumerate(calls) if i % len(model.model.layers) == 0]
    assert passes == [[3 + n, 30 + n] for n in range(1, 8)]
    assert len(plans) == len(passes)


def test_fp8_logits_agree_with_the_references(checkpoint, monkeypatch):
    """The checkpoint's FP8 weights stay FP8 and are multiplied with FP8 activations. Everything else is fp32."""
    products = []

    def beside_the_reference(op):
        def checked(*arguments, **options):
            got = op(*arguments, **options)
            with dsa.use_backend("reference"):
                assert calc_diff(got, op(*arguments, **options)) < 1e-5
            products.append(op)
            return got

        return checked

    for name in ("fp8_gemm_nt", "grouped_fp8_gemm_nt"):
        monkeypatch.setattr(dsa, name, beside_the_reference(getattr(dsa, name)))
    logits = []
    for device in ("cpu", "cuda"):
        model = load_model(checkpoint, device=device, dtype=torch.float32, progress=False)
        tokens = torch.arange(100, 180, device=device)
        with torch.inference_mode():
            out = model(tokens, SequenceBatch.without_cache([80], device), all_tokens=True)
        logits.append(out.cpu())
    assert len(set(products)) == 2
    # A difference in the last bit of fp32 can change the rounding of a value to e4m3. The rounded value then changes by
    # 1/16 to 1/8, which can change the chosen experts. Quantisation itself gives the logits a calc_diff of about 0.05.
    assert calc_diff(*logits) < 4e-2


@pytest.mark.parametrize("family", ALL)
def test_captured_steps_are_those_that_run_as_python(family, load_tiny, monkeypatch):
    """The second run of a step writes the same to the caches. The sequences end one after another."""
    model = load_tiny(family)
    step, replayed = DecodeStep.__call__, []

    def both(self, sequences):
        captured = step(self, sequences)[0].clone()
        self.captures, captures = False, self.captures
        expected, _ = step(self, sequences)
        self.captures = captures
        assert calc_diff(captured, expected) < 1e-3
        replayed.append(captures)
        return captured, None

    monkeypatch.setattr(DecodeStep, "__call__", both)
    limits = [30, 3, 9, 20, 14]
    prompts = [[*prompt, i] for i, prompt in enumerate([*PROMPTS, *PROMPTS, [5]])]
    generator = Generator(model, cache_tokens=2048)
    completions = generator.generate(prompts, [SamplingParams(n) for n in limits])
    assert [len(c.tokens) for c in completions] == limits
    assert len(replayed) == max(limits) - 1 and all(replayed)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_dtypes_over_fp8_caches(family, load_tiny):
    for dtype in (torch.float16, torch.float32):
        model = load_tiny(family, dtype=dtype, kv_cache="fp8")
        completions = Generator(model, cache_tokens=1024).generate(PROMPTS, SamplingParams(4))
        assert all(len(c.tokens) == 4 for c in completions)


def test_many_sequences_share_pages_and_slots(checkpoint):
    """At most 64 of 100 sequences run at a time. In the second generation they get pages that other sequences have
    used."""
    model = without_end(load_model(checkpoint, device="cuda", progress=False))
    prompts = [[i + 5, *range(10, 10 + i % 37)] for i in range(100)]
    params = [SamplingParams(4 + i % 9) for i in range(100)]
    generator = Generator(model, cache_tokens=64 * 64, max_sequences=64)
    free = generator.cache.allocator.free
    first = [c.tokens for c in generator.generate(prompts, params)]
    assert [len(tokens) for tokens in first] == [one.max_tokens for one in params]
    assert generator.cache.allocator.free == free
    assert [c.tokens for c in generator.generate(prompts, params)] == first


def test_sampled_tokens_are_those_of_a_cpu():
    kinds = ({}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 50}, {"temperature": 0.6, "top_p": 0.95})
    params = [SamplingParams(**kinds[i % 4]) for i in range(44)]
    params += [SamplingParams(temperature=2.0, top_k=3, top_p=0.5), SamplingParams(temperature=1e-3, top_p=0.1)]
    generator = torch.Generator().manual_seed(3)
    logits = (
        torch.randn(len(params), 3, 129280, generator=generator)
        * torch.rand(len(params), 1, 1, generator=generator)
        * 8
    )
    logits[4:8] = logits[4:8].round()  # makes ties, also across the limit of top_k = 50
    logits[8:12, 1, 7], logits[12:16, 0] = torch.nan, -torch.inf
    drafts = [row[:2].tolist() for row in logits.argmax(-1)]  # some are accepted
    sequences = [
        SimpleNamespace(params=one, seed=i, tokens=[1], prompt_len=1, drafts=own)
        for i, (one, own) in enumerate(zip(params, drafts))
    ]
    found = [sample(x, sequences) for x in (logits, logits.cuda())]
    assert found[1] == found[0] and {len(row) for row in found[0]} == {1, 2, 3} and [None] in found[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_nan_ends_its_sequence_alone(family, temperature, load_tiny):
    """Later sequences get the pages and the state slot of the sequence with NaN."""
    model = load_tiny(family)
    embeddings = next(weight for name, weight in model.named_parameters() if "embed" in name)
    embeddings.data[77] = torch.nan
    prompts = [[5, 6, 7, 8] * 20, [8, 77, 9] * 30, [77], [10, 11, 12]]
    params = [SamplingParams(6, temperature=temperature, seed=i) for i in range(4)]
    generator = Generator(model, cache_tokens=512, max_sequences=2)
    first, second = (generator.generate(prompts, params) for _ in range(2))
    assert [one.finish_reason for one in first] == ["length", "error", "error", "length"] and first == second
    assert [len(one.tokens) for one in first] == [6, 0, 0, 6]


@pytest.mark.parametrize("family", ALL)
def test_a_pass_over_prompts_waits_for_nothing(family, load_tiny):
    """PyTorch's sync debug mode raises if the host waits for the GPU. One sequence has more keys than are selected, the
    other has fewer."""
    model = load_tiny(family)
    cache = model.make_cache(8, device="cuda", state_slots=2)
    pages, new = [range(6), range(6, 8)], [150, 30]
    tokens = torch.arange(1, 1 + sum(new), device="cuda")

    @torch.inference_mode()
    def run():
        for earlier in ([0, 0], new):
            chunks = [Chunk(n, before, own, i) for i, (n, before, own) in enumerate(zip(new, earlier, pages))]
            model(tokens, prefill_batch(chunks, cache.page_size, "cuda"), cache)

    run()  # the first run compiles and loads the kernels, and keeps the dequantised weights
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("pages", [None, torch.bfloat16, "fp8"], ids=str)
@pytest.mark.parametrize("sizes", [(128, 64, 128), (192, 64, 256)], ids=str)
def test_both_forms_of_attention_over_selected_keys(sizes, pages, monkeypatch):
    """In the multi-head form, keys and values are views of one projection of the latents. In the absorbed form, queries
    are projected to latents. pages: dtype of the cache's latents; None: no cache"""
    nope, rope, value = sizes
    with torch.device("cuda"):
        indexer = LightningIndexer(256, 128, n_heads=64, top_k=128, quantize=True, fp8=True, dtype=torch.bfloat16)
        options = {"q_lora_rank": 128, "nope_dim": nope, "rope_dim": rope, "v_dim": value}
        layer = fuse(DSAAttention(256, 16, indexer, fp8=True, dtype=torch.bfloat16, **options))
    x, lengths = torch.randn(760, 256, device="cuda").bfloat16(), [700, 60]
    rotary = RotaryEmbedding(rope_frequencies(rope, 1e4)).cuda()
    results = []
    for multi_head in (True, False):
        monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_, form=multi_head: form)
        batch, cache = SequenceBatch.without_cache(lengths, "cuda"), None
        if pages is not None:
            batch = SequenceBatch.paged(lengths, lengths, [[*range(11)], [11]], 64, "cuda")
            cache = PagedKVCache(1, 12, 64, latent=pages, index="fp8", device="cuda").layer(0)
        with torch.inference_mode():
            y, selected = layer(x, *rotary(batch.positions), batch, cache)
        results.append(y.float())
        assert (selected.bits is not None) == multi_head
    # The absorbed form uses dequantised projections, while the multi-head form rounds latents to e4m3.
    assert (results[0] - results[1]).norm() < 0.06 * results[1].norm()


@pytest.mark.parametrize(("chunk", "passes"), [(1000, [483]), (50, [50] * 5 + [33])])
@pytest.mark.parametrize("kv_cache", ["model", "fp8"])
def test_prefill_beside_the_references(kv_cache, chunk, passes, record_property):
    """passes: the number of queries of each pass in which some sequence has more keys than the indexer selects"""
    run, queries = tiny_model.run_beside_references(kv_cache, chunk, 1, "flash_mla_sparse_fwd", record_property)
    assert queries == [n for n in passes for _ in range(tiny_model.LAYERS)]
    assert run.launched >= tiny_model.PREFILL_OPS
    # The op that writes new latents to the cache also returns them. A pass reads pages only if sequences have earlier
    # chunks.
    assert ("read_kv_cache" in run.launched) == (chunk == 50)


@pytest.mark.parametrize("kv_cache", ["model", "fp8"])
def test_decoding_beside_the_references(kv_cache, record_property):
    run, queries = tiny_model.run_beside_references(kv_cache, 1000, 24, "flash_mla_with_kvcache", record_property)
    assert queries == [3] * 23 * tiny_model.LAYERS
    assert run.launched >= tiny_model.PREFILL_OPS | tiny_model.DECODE_OPS
