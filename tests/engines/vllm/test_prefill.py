"""vLLM's multi-head attention of prompts with the plugin, compared with dense attention with a mask in float64."""

import sys
import types
from types import SimpleNamespace as Space

import pytest
import torch

import dsa
from dsa_engines.vllm import prefill
from tests.engines.sglang.batches import int32, latent_cache, paged, slots_of
from tests.engines.vllm import engine
from tests.engines.vllm.stand_in import Original, never

HEADS, NOPE, ROPE, VALUE, LATENT, TOPK, SCALE = 2, 16, 8, 24, 32, 8, 0.3
DECODED = 2  # sequences of one token, before the prompts
OTHERS = (("kv_cache_dtype", "nvfp4_ds_mla"), ("dcp_world_size", 2), ("pcp_world_size", 2))
LIMIT = 2 * 5 * HEADS * (NOPE + VALUE)  # bytes of the keys and values of five tokens


def implementation(**more):
    weight = torch.randn(HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5
    sizes = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    given = {"kv_cache_dtype": "bfloat16", "dcp_world_size": 1, "pcp_world_size": 1, "scale": SCALE, "weight": weight}
    project = {"kv_lora_rank": LATENT, "kv_b_proj": lambda latents: (latents @ weight.T, None)}
    return Space(**sizes | given | project | more)


class Batch:
    """Prompts with new[b] new tokens after before[b] cached ones, after DECODED sequences that decode."""

    def __init__(self, new, before, topk=TOPK):
        total = [n + context for n, context in zip(new, before)]
        starts = int32([0, *torch.tensor(new).cumsum(0).tolist()])
        self.table, pages = paged(total)
        self.rows = [torch.randn(length, LATENT + ROPE) for length in total]
        self.cache = torch.full((pages, 64, LATENT + ROPE), float("nan"))
        for b, rows in enumerate(self.rows):
            self.cache.view(-1, LATENT + ROPE)[slots_of(self.table, b, len(rows))] = rows
        self.latents, self.rope = torch.cat([rows[-n:] for rows, n in zip(self.rows, new)]).split([LATENT, ROPE], -1)
        self.visible = [context + i + 1 for n, context in zip(new, before) for i in range(n)]
        self.sequence = [b for b, n in enumerate(new) for _ in range(n)]
        self.q = torch.randn(sum(new), HEADS, NOPE + ROPE)
        self.indices = torch.full((DECODED + sum(new) + 3, TOPK), 1, dtype=torch.int32)
        for row, visible in zip(self.indices[DECODED:], self.visible):
            if visible > TOPK:  # the op takes all keys of the other queries, and does not read their rows
                row[:] = torch.randperm(visible)[:TOPK]
        context = Space(context_lens_list=before) if any(before) else None
        self.metadata = Space(
            prefill=Space(
                query_lens_cpu=torch.tensor(new),
                query_start_loc=starts,
                chunked_context=context,
                block_table=self.table,
            ),
            prefill_max_seq_len=max(total),
            topk_tokens=topk,
            seq_lens=int32([700] * DECODED + total),
            num_decodes=DECODED,
            num_decode_tokens=DECODED,
        )

    def arguments(self):
        output = torch.full((len(self.q), HEADS * VALUE), float("nan"))
        return self.q, self.latents, self.rope[:, None], self.cache, self.metadata, torch.ones(1), output

    def expected(self, weight):
        """Return the attention of every query in float64, over the selected keys if there are more than topk."""
        outs = []
        for q, indices, visible, b in zip(self.q.double(), self.indices[DECODED:], self.visible, self.sequence):
            latents, rope = self.rows[b][:visible].double().split([LATENT, ROPE], -1)
            k, v = (latents @ weight.double().T).view(visible, HEADS, -1).split([NOPE, VALUE], -1)
            logits = (torch.einsum("hd,shd->hs", q[:, :NOPE], k) + q[:, NOPE:] @ rope.T) * SCALE
            if visible > self.metadata.topk_tokens:
                unselected = torch.ones(visible, dtype=torch.bool).index_fill(0, indices.long(), False)
                logits = logits.masked_fill(unselected, -float("inf"))
            outs.append(torch.einsum("hs,shd->hd", logits.softmax(-1), v).flatten())
        return torch.stack(outs)


@pytest.mark.parametrize("topk", [TOPK, 100], ids=["selected keys", "all keys"])
@pytest.mark.parametrize(("new", "before"), [([5, 20, 1], [0, 0, 0]), ([4, 9, 11], [70, 0, 3])])
def test_prompts(new, before, topk):
    batch = Batch(new, before, topk)
    attention = implementation(topk_indices_buffer=batch.indices if topk == TOPK else None)
    *_, output = given = batch.arguments()
    prefill.forward_mha(never)(attention, *given)
    assert torch.allclose(output.double(), batch.expected(attention.weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "lengths", "output_scale", "most"),
    [
        *(({name: value}, [5], None, LIMIT) for name, value in OTHERS),
        ({}, None, None, LIMIT),
        ({}, [5], torch.ones(1), LIMIT),
        ({}, [5], None, LIMIT - 1),
    ],
)
def test_other_prompts_are_left_to_the_engine(monkeypatch, more, lengths, output_scale, most):
    monkeypatch.setattr(prefill, "EXPANDED_BYTES", most)
    batch, original = Batch([5], [0], topk=100), Original()
    batch.metadata.prefill.query_lens_cpu = lengths and torch.tensor(lengths)
    given = implementation(**more), *batch.arguments(), output_scale
    prefill.forward_mha(original)(*given)
    original.assert_called_once(given)


def test_the_rows_of_a_cache_of_bytes_are_read_by_the_engine(monkeypatch):
    """The stand-in for vLLM's kernel has vLLM's parameters."""
    operators = types.ModuleType("vllm._custom_ops")
    operators.cp_gather_and_upconvert_fp8_kv_cache = engine.upconvert
    package = types.ModuleType("vllm")
    package._custom_ops = operators
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", operators)
    (table, pages), lengths = paged([70, 3]), [70, 3]
    cache, _ = latent_cache(656, pages)
    found = prefill.cached_latents(cache.squeeze(2), table, int32([0, 70, 73]), 73, "fp8_ds_mla")
    slots = torch.cat([slots_of(table, b, n) for b, n in enumerate(lengths)])
    assert torch.equal(found, dsa.read_kv_cache(cache, slots).bfloat16())


def layer_of(**more):
    given = {
        "hisparse_cache": None,
        "attn_backend": Space(get_name=lambda: prefill.BACKEND),
        "_vllm_config": Space(attention_config=Space(sparse_mla_force_mqa=False)),
        "impl": implementation(),
    }
    return Space(**given | more)


@pytest.mark.parametrize("faster", [False, True])
def test_lengths_decide_once_for_all_layers(monkeypatch, faster):
    calls = []
    monkeypatch.setattr(prefill, "multi_head_is_faster", lambda *given: calls.append(given) or faster)
    use, metadata = prefill.use_sparse_mha(lambda self, metadata: False), Batch([4, 9], [70, 0]).metadata
    assert [use(layer_of(), metadata) for _ in range(3)] == [faster] * 3
    ((new, total, topk, sizes),) = calls
    assert (new, total, topk) == ([4, 9], [74, 9], TOPK)
    assert (sizes.heads, sizes.nope, sizes.rope, sizes.value, sizes.latent) == (HEADS, NOPE, ROPE, VALUE, LATENT)


@pytest.mark.parametrize(
    "more",
    [
        {"hisparse_cache": object()},
        {"attn_backend": Space(get_name=lambda: "FLASHINFER_MLA_SPARSE_SM90")},
        {"_vllm_config": Space(attention_config=Space(sparse_mla_force_mqa=True))},
        *({"impl": implementation(**{name: value})} for name, value in OTHERS),
    ],
)
def test_other_layers_take_the_form_that_the_engine_chooses(monkeypatch, more):
    monkeypatch.setattr(prefill, "multi_head_is_faster", lambda *given: True)
    metadata = Batch([5], [0]).metadata
    assert prefill.use_sparse_mha(lambda *given: False)(layer_of(), metadata) is True
    for chosen in (False, True):
        use = prefill.use_sparse_mha(lambda *given, chosen=chosen: chosen)
        assert use(layer_of(**more), Batch([5], [0]).metadata) is chosen
        for unknown in (None, Space(query_lens_cpu=None)):
            assert use(layer_of(), Space(prefill=unknown)) is chosen
