"""The comparison of dsa with transformers' own attention, with a small model on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from dsa_bench.e2e import against_transformers as comparison
from dsa_layers.parallel.ranks import ALONE
from tests.bench.parallel_ranks import HostClock

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 4,
    "index_topk": 8, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_way_has_prompts_and_steps_of_all_lengths(monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK", 7)
    found = [*comparison.rows(2, [9, 20], HostClock(ALONE), **SMALL)]
    ways = ["eager", "sdpa", "dsa", "dsa, FP8 index scores"]
    assert [(row["way"], row["run"], row["tokens"]) for row in found] == [
        (way, run, tokens) for way in ways for run in ("prompt", "step") for tokens in (9, 20)
    ]
    for place, row in enumerate(found):
        earlier = [each["ms"] for each in found[: min(place, 8)] if each["shape"].endswith(row["shape"].split(": ")[1])]
        expected = min(earlier) / row["ms"] if earlier else None
        assert row["shape"] == f"{row['way']}: {row['run']} of {row['tokens']} tokens" and row["layers"] == 2
        assert row["ms"] > 0 and row["gib"] == 1e9 / 2**30 and row["ratio"] == expected


def test_all_tokens_of_a_prompt_and_single_tokens_after_it_are_timed():
    calls = []

    class Model(torch.nn.Module):
        def forward(self, ids, use_cache=None, cache=None):
            calls.append((ids.shape[1], cache, use_cache))
            return SimpleNamespace(cache=(cache or 0) + ids.shape[1])

    ids = torch.zeros(1, 2000, dtype=torch.int64)
    assert len(comparison._prompt(Model(), ids, 900)) == comparison.REPEATS
    assert set(calls) == {(900, None, False)}
    calls.clear()
    assert len(comparison._steps(Model(), ids, 1100)) == comparison.STEPS
    assert [n for n, *_ in calls] == [512, 512, 76, *[1] * (1 + comparison.STEPS)]
    assert all(cache == 1100 for n, cache, _ in calls if n == 1)


def test_a_run_without_enough_memory_is_a_row():
    def run():
        raise torch.OutOfMemoryError("CUDA out of memory")

    ms, gib = comparison._measured(run, HostClock(ALONE))
    assert ms is None and comparison.compared(ms, gib, 5.0) == {"ratio": None, "figure": "out of memory"}
    assert comparison.compared(2.0, 0.5, ms) == {"ratio": None, "figure": "2.00 ms, 0.5 GiB"}
    assert comparison.compared(2.0, 0.5, 5.0) == {"ratio": 2.5, "figure": "2.00 ms, 0.5 GiB, 2.50x"}
