"""Contexts of a million tokens (2^20) on the GPU: every layer selects planted keys ("needles"), the memory of a pass is
limited, and the ops of these passes are right."""

from functools import partial
from unittest import mock

import pytest
import torch

import dsa
from dsa.testing import calc_diff, poison_free_memory
from dsa_bench.e2e.command import asked_of, compile_ahead, quiet
from dsa_bench.e2e.runs import Prompts
from dsa_bench.e2e.stacks import skeleton, stack
from dsa_layers.engine.paged_attention import most_read
from dsa_layers.layers.rope import make_rotary
from tests.bench.small_stacks import FEWER, SMALL
from tests.needles import Haystack, planted

TOKENS = 2**20
SHARES = (0.0, 0.1, 0.3333, 0.5, 0.77, 0.99, 0.99999)
SELECT = {"V4-Flash": 2, "GLM-5.2": 1}  # layers with an indexer


def small_stack(name):
    """Return a small stack of layers, after compiling the kernels of this file's passes in parallel. One after another
    they would take minutes."""
    sizes = SMALL | FEWER[name]
    prompts = [(8192, begin) for begin in range(0, TOKENS, 2**17)] + [(8192, TOKENS - 8192), (300, TOKENS - 300)]
    asked = partial(asked_of, skeleton(name, **sizes), [[prompt] for prompt in prompts], [(1, TOKENS)])
    compile_ahead(asked, quiet)
    return stack(name, "cuda", **sizes)


@pytest.mark.parametrize("name", SELECT)
def test_every_layer_finds_needles(name, record_error):
    """A short pass over a prompt writes its scores. A long pass selects keys while it scores them and writes no scores.

    Scores differ from the fp32 formula by about 5e-4 of their root mean square, a few by six times as much. Tensor
    cores add FP8 products with fewer bits than fp32 has, and a prompt's scores have fp16 accumulators.
    """
    model = small_stack(name)
    hay = Haystack(model, TOKENS, "cuda")
    with planted(SHARES) as finds:
        hay.decode()
        assert finds.selections == SELECT[name]
        hay.prefill(300)
        in_two = finds.selections
        with mock.patch.object(dsa, "topk_indices", side_effect=AssertionError("scores are written")):
            hay.prefill(8192)
    assert in_two > 2 * SELECT[name] and finds.selections >= in_two + SELECT[name] and finds.lacking == 0
    record_error(finds.error)
    assert finds.error < 5e-3


@pytest.mark.parametrize("name", SELECT)
def test_a_long_context_takes_less_than_half_a_gibibyte(name):
    """At the third length a pass copies the largest number of latents from pages to a workspace. Attention over longer
    contexts reads the pages themselves. The small stack's activations are too small to hide the workspace."""
    model = small_stack(name)
    latents = most_read(model.config.num_attention_heads) // (2 * 576)
    prompt = Prompts(model, 1, TOKENS, 8192)
    for tensor in prompt.cache.tensors():
        tensor.view(torch.uint8).random_(0x28, 0x38)
    needed = []
    for end in (2**14, 2**17, latents // 8192 * 8192, TOKENS):
        prompt.compute(end - 8192)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        prompt.compute(end - 8192)
        needed.append(torch.cuda.max_memory_allocated() - held)
    assert all(more - needed[0] < 2**29 for more in needed[1:]), needed


@pytest.mark.parametrize("heads", [16, 64])
def test_prefills_over_fp8_pages(heads, record_error):
    pages, k = 300, 2048
    cache = torch.empty(pages, 64, 1, 656, dtype=torch.uint8, device="cuda")
    slots = torch.arange(64 * pages, device="cuda")
    dsa.write_kv_cache(torch.randn(64 * pages, 576, device="cuda").bfloat16(), cache, slots)
    q = torch.randn(8192, heads, 576, device="cuda").bfloat16()
    indices = torch.randint(0, 64 * pages, (8192, k), dtype=torch.int32, device="cuda")
    counts = torch.randint(1, k + 1, (8192,), dtype=torch.int32, device="cuda")
    poison_free_memory()
    attend = partial(dsa.flash_mla_with_kvcache, q[:, None], cache, None, None, 512, None)
    got, _ = attend(softmax_scale=576**-0.5, is_fp8_kvcache=True, indices=indices[:, None], topk_length=counts)
    kv = dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16)
    expected, *_ = dsa.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], 576**-0.5, 512, topk_length=counts)
    difference = calc_diff(got[:, 0], expected)
    record_error(difference)
    assert difference < 5e-5


@pytest.mark.parametrize("heads", [16, 64])
def test_tokens_share_a_list_of_entries(heads):
    queries, entries, window = 1000, 8192, 128
    q, kv, compressed = (
        torch.randn(n, h, 512, device="cuda").bfloat16() for n, h in ((queries, heads), (queries, 1), (entries, 1))
    )
    bounds = torch.tensor([0, queries], dtype=torch.int32, device="cuda")
    shared = torch.arange(entries, dtype=torch.int32, device="cuda").expand(queries, -1)
    counts = torch.randint(0, entries + 1, (queries,), dtype=torch.int32, device="cuda")
    each = torch.where(shared < counts[:, None], shared, -1)
    sink = torch.randn(heads, device="cuda")
    cos, sin = torch.randn(2, queries, 32, device="cuda")
    packed = q, kv, bounds, bounds, window, compressed
    of = {"plain": (512**-0.5, 512, sink), "cast": (cos, sin, 8, 512**-0.5, sink)}
    ops = {"plain": dsa.window_sparse_attention, "cast": dsa.window_attention_cast_to_fp8}
    for kind, op in ops.items():
        one, many = (op(*packed, lists, *of[kind], counts) for lists in (shared, each))
        for x, y in zip(one, many):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", ["V3.2", "GLM-5", "GLM-5.2", "V4-Flash"])
def test_angles_are_those_of_the_cpu(name):
    """Another test checks the error of the CPU's numbers at a million tokens."""
    config = skeleton(name).config
    positions = torch.arange(TOKENS - 8192, TOKENS)
    for rope in {config.rope, getattr(config, "compress_rope", config.rope)}:
        rotary = make_rotary(config.qk_rope_head_dim, rope)
        expected = rotary(positions)
        for x, y in zip(rotary.cuda()(positions.cuda()), expected):
            assert (x.cpu() - y).abs().max() < 1e-6
