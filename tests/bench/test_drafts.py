"""The benchmark of decoding with drafts, with small stacks on a CPU and a fake clock."""

import json

import pytest
import torch

import dsa
from dsa_bench.e2e import drafts
from dsa_bench.e2e.drafts import DraftedDecoding, gain, run_of, tokens_a_round
from dsa_bench.e2e.full_depth import (
    cached_bytes,
    depths,
    experts_touched,
    first_layers,
    full_depth,
    layers_of,
    pass_bytes,
)
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, with_layers
from dsa_layers.generation.steps import DraftStep
from dsa_layers.layers.experts import Experts
from tests.bench.small_stacks import make_small, small_stack

CONTEXT, COPY, DRAFT_MS = 300, 2e12, 3.0
by_stack = pytest.mark.parametrize("name", STACKS)


@pytest.fixture
def drafted(monkeypatch, recorded):
    """Fake all times: a pass takes 1 + layers * tokens ms, and the drafter takes DRAFT_MS. Return a list to which each
    run of the drafter appends its drafts."""
    layers, found = recorded(drafts, "first_layers"), []

    def bench(calls, repeats, graph):
        assert repeats == drafts.REPEATS and graph
        ((name, call),) = calls.items()
        results = call()
        if not isinstance(results, tuple) and results.dtype == torch.int64:
            found.append(results)
            return {name: DRAFT_MS}
        logits = results[0] if isinstance(results, tuple) else results
        assert logits.isfinite().all()
        return {name: 1.0 + layers[-1][1] * len(logits)}

    monkeypatch.setattr(drafts, "bench", bench)
    return found


@pytest.mark.slow
def test_figures_of_rows_follow_from_three_depths(drafted, monkeypatch):
    for name in STACKS:
        monkeypatch.setitem(STACKS, name, STACKS[name])
    make_small(STACKS)
    monkeypatch.setattr(drafts, "CONTEXT", CONTEXT)
    monkeypatch.setattr(drafts, "copy", lambda: COPY)
    told, done = [], [f"V3.2 {run_of(*case)}" for case in ((1, 1), (1, 3), (3, 2), (3, 3))]
    done += [f"GLM-5 {run_of(n, 1)}" for n in (1, 3)]
    rows = list(drafts.rows(sequences=[3, 1], device="cpu", done=done, tell=told.append))
    assert json.loads(json.dumps(rows)) == rows
    assert [row["shape"] for row in rows] == [
        *("V3.2 decode 1 x 300, 2 drafts", "V3.2 decode 3 x 300, 1 draft"),
        *("V4-Flash decode 1 x 300, 1 draft", "V4-Flash decode 3 x 300, 1 draft"),
    ]
    assert "V4-Flash: model made" in told and "GLM-5: model made" not in told
    for row in rows:
        count, k, plain, verify = row["sequences"], row["drafts"], row["plain"], row["verify"]
        measured, layers = {"V3.2": (4, 61), "V4-Flash": (5, 43)}[row["model"]]
        round_ms, tokens, copied = verify["ms"] + DRAFT_MS, row["tokens_a_round"], [p["bytes"] for p in (plain, verify)]
        assert plain["depths"] == [1.0, 1.0 + count, 1.0 + measured * count]
        assert 2 <= plain["touched"] < verify["touched"] <= 8 and copied[0] < copied[1]
        assert row == row | {
            "layers": layers,
            "run": row["shape"].removeprefix(f"{row['model']} "),
            "plain": plain | {"ms": pytest.approx(1 + layers * count)},
            "verify": verify | {"ms": pytest.approx(1 + layers * count * (1 + k))},
            "copy": COPY,
            "of_copy": pytest.approx([n / COPY * 1e3 / p["ms"] for n, p in zip(copied, (plain, verify))]),
            "over_bytes": pytest.approx(row["of_copy"][0] / row["of_copy"][1]),
            "draft_ms": DRAFT_MS,
            "ms": round_ms,
            "gain": pytest.approx(tokens / round_ms * plain["ms"]),
            "tokens/s": pytest.approx(count * tokens / round_ms * 1e3),
            "figure": f"{row['gain']:.2f}x the tokens/s without drafts",
        }


@by_stack
def test_timed_passes_are_passes_of_generation(name, drafted, monkeypatch):
    """A pass computes each sequence's last token and its drafts, and all these tokens differ. With drafts, sequences
    are shorter by the number of drafts. So the pass ends at the same position as without drafts."""
    model = small_stack(name, drafter=True)
    seen, inputs = [], []
    states, draft = model.states, DraftStep._run

    def recording_states(tokens, batch, cache):
        seen.append((tokens.clone(), batch.positions.clone()))
        return states(tokens, batch, cache)

    monkeypatch.setattr(model, "states", recording_states)
    monkeypatch.setattr(DraftStep, "_run", lambda step, given: inputs.append(given) or draft(step, given))
    run = DraftedDecoding(model, 3, CONTEXT, 2)
    assert run.pass_ms(len(layers_of(model))) == 1 + 9 * len(layers_of(model))
    (tokens, positions), again = seen
    assert tokens.unique().numel() == 9 and torch.equal(tokens, again[0])
    assert positions.view(3, 3).tolist() == [[CONTEXT - 3, CONTEXT - 2, CONTEXT - 1]] * 3
    assert run.drafting_ms() == DRAFT_MS and drafted[0].shape == (3, 2)
    first, second = inputs
    assert first is second and first.taken.tolist() == [3] * 3 and first.key_lens.tolist() == [CONTEXT - 2] * 3
    assert first.tokens.unique().numel() == 9 and first.states.float().std() > 0.1
    plain = DraftedDecoding(model, 3, CONTEXT, 0)
    assert [len(sequence.tokens) for sequence in plain._sequences] == [CONTEXT] * 3


@by_stack
def test_a_stack_without_its_last_layers_goes_from_the_remaining_layers_to_the_head(name):
    model = small_stack(name, drafter=True)
    before, logits = [*layers_of(model)], []
    run = DraftedDecoding(model, 2, CONTEXT, 0)
    # Two tokens go to two experts each. So each layer has two to four experts with tokens.
    mixtures = [key for key, layer in model.named_modules() if isinstance(layer, Experts) and "drafter" not in key]
    assert len(run.touched) == len(mixtures) and all(2 <= touched <= 4 for touched in run.touched)
    assert depths(model) == (0, 1, len(before))
    for count in depths(model):
        with first_layers(model, count):
            logits.append(run._step.again())
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])
    assert torch.equal(run._step.again(), logits[2])
    assert all(x is y for x, y in zip(layers_of(model), before, strict=True))
    tokens = torch.tensor([sequence.tokens[-1] for sequence in run._sequences])
    with torch.inference_mode():
        if name == "V4-Flash":
            states = model.embed(tokens[:, None].expand(-1, model.config.hc_mult))
        else:
            states = model.model.norm(model.model.embed_tokens(tokens))
        assert torch.equal(model.logits(states), logits[0])


COSTS = {"FusedSwiGLU": 2.0, "FusedMoE": 7.0}
COSTS |= {"sliding_attention": 2.0, "compressed_sparse_attention": 8.0, "heavily_compressed_attention": 6.0}


@by_stack
def test_full_depth_counts_every_layer_by_its_kind(name):
    def cost(model, count):
        kinds = getattr(model.config, "layer_types", None) or [type(layer.mlp).__name__ for layer in layers_of(model)]
        return 5.0 + sum(COSTS[kind] for kind in kinds[:count])

    model, layers = skeleton(name), published_layers(name)
    found = [cost(model, count) for count in depths(model)]
    expected = cost(skeleton(name, **with_layers(name, layers)), layers)
    # V4-Flash has 21 layers of cost 8 and 20 of cost 6. `full_depth` counts 20.5 of each.
    assert full_depth(name, *found) == expected - (1.0 if name == "V4-Flash" else 0.0)


@by_stack
def test_a_pass_reads_all_weights_of_its_layers_and_experts_with_tokens(name):
    model = skeleton(name, drafter=True)
    tensors = {key: x for key, x in model.named_parameters() if not key.startswith("drafter")}
    every = sum(x.nbytes for key, x in tensors.items() if "embed" not in key and not key.endswith("tid2eid"))
    experts = sum(x.nbytes for key, x in tensors.items() if ".experts." in key)
    layer = sum(x.nbytes for key, x in tensors.items() if "layers.0." in key and not key.endswith("tid2eid"))
    mixtures = sum(isinstance(module, Experts) for key, module in model.named_modules() if "drafter" not in key)
    cached = cached_bytes(model, 8, 4096)
    cache = model.make_cache(8 * 4096 // model.page_size, device="meta", state_slots=8)
    assert len(cached) == len(layers_of(model)) and sum(cached) == cache.nbytes > 0
    assert pass_bytes(model, [256] * mixtures, cached) == pytest.approx(every + sum(cached))
    assert pass_bytes(model, [8] * mixtures, cached) == pytest.approx(every + sum(cached) - experts * 248 / 256)
    head = (model.head if name == "V4-Flash" else model.lm_head).weight.nbytes
    with first_layers(model, 0):
        ends = pass_bytes(model, [256] * mixtures, cached)
    with first_layers(model, 1):
        first = pass_bytes(model, [256] * mixtures, cached)
    assert head <= ends < head + 1e6 and first == pytest.approx(ends + layer + cached[0])


def test_experts_with_tokens_are_counted_whichever_op_sorts_the_tokens():
    ops = dsa.sort_by_expert, dsa.route_to_experts, dsa.route_by_table
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    table, tokens = torch.tensor([[3, 4], [4, 9]]), torch.tensor([0, 0, 1, 0, 0])
    with experts_touched() as found, torch.inference_mode():
        dsa.sort_by_expert(torch.tensor([[0, 3], [3, 7], [7, 0]]), 8)
        experts, *_ = dsa.route_to_experts(x, weight, torch.zeros(16), 2)
        dsa.route_by_table(x, weight, table, tokens)
    assert [int(number) for number in found] == [3, experts.unique().numel(), 3]
    assert (dsa.sort_by_expert, dsa.route_to_experts, dsa.route_by_table) == ops


def test_gain_is_tokens_of_a_round_over_its_time():
    assert tokens_a_round(1) == 1.85 and tokens_a_round(3, 0.5) == 1.875
    assert gain(10.0, 17.5, 1.0, 1) == pytest.approx(1.0)
    assert gain(10.0, 10.0, 0.0, 2, 1.0) == 3.0


@by_stack
def test_a_stack_with_a_drafter_has_the_weights_of_the_stack_and_drafts_that_vary(name):
    model, plain = small_stack(name, drafter=True), small_stack(name)
    weights = model.state_dict()
    assert plain.drafter is None and model.drafter is not None
    assert {key for key in weights if not key.startswith("drafter.")} == {*plain.state_dict()}
    for key, tensor in plain.state_dict().items():
        assert torch.equal(*(x.contiguous().view(torch.uint8) for x in (weights[key], tensor)))
    run = DraftedDecoding(model, 3, CONTEXT, 1)
    step = DraftStep(model.drafter, run._cache, 1, run._step.padding, torch.device("cpu"))
    drafts.fill(step.cache)
    logits, head = [], model.drafter.logits
    model.drafter.logits = lambda states: logits.append(head(states)) or logits[-1]
    step(run._sequences, [[1, 2]] * 3, run._states)
    assert logits[0].isfinite().all() and 0.3 < logits[0].std() < 3 and logits[0].std(0).mean() > 0.1
