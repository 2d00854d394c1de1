"""The comparison with transformers' eager attention, with a small model on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from dsa_bench.e2e import against_transformers as comparison
from dsa_bench.e2e.against_transformers import Row
from dsa_layers.hf.paged_layer import CACHE

SMALL = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 4,
    "index_topk": 8, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_way_has_prompts_and_steps_of_all_lengths(monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK", 7)
    found = [*comparison.rows(comparison.make_model(2, "cpu", **SMALL), [9, 20])]
    ways = ["eager", "dsa", "dsa, FP8 index scores"]
    assert [(row.way, row.run, row.tokens) for row in found] == [
        (way, run, tokens) for way in ways for run in ("prompt", "step") for tokens in (9, 20)
    ]
    assert all(row.ms > 0 for row in found)
    lines = comparison.table(found).splitlines()
    assert len(lines) == 5 and all(line.count("x") == 2 for line in lines[1:])


def test_all_tokens_of_a_prompt_and_single_tokens_after_it_are_timed():
    calls = []

    class Model(torch.nn.Module):
        def forward(self, ids, use_cache=None, **arguments):
            cache = arguments.get(CACHE)
            calls.append((ids.shape[1], cache, use_cache))
            return SimpleNamespace(**{CACHE: (cache or 0) + ids.shape[1]})

    ids = torch.zeros(1, 2000, dtype=torch.int64)
    assert len(comparison._prompt(Model(), ids[:, :900])) == comparison.REPEATS
    assert set(calls) == {(900, None, False)}
    calls.clear()
    assert len(comparison._steps(Model(), ids, 1100)) == comparison.STEPS
    assert [n for n, *_ in calls] == [512, 512, 76, *[1] * (1 + comparison.STEPS)]
    assert all(cache == 1100 for n, cache, _ in calls if n == 1)


def test_a_run_without_enough_memory_is_a_row():
    def run():
        raise torch.OutOfMemoryError("CUDA out of memory")

    failed = Row("eager", "prompt", 8, *comparison._measured(run, torch.device("cpu")))
    ours = Row("dsa", "prompt", 8, 2.0, 0.5)
    cells = [cell.strip() for cell in comparison.table([failed, ours]).splitlines()[1].split("  ") if cell]
    assert failed.ms is None and cells[-2:] == ["out of memory", "2.00 ms, 0.5 GiB"]
    assert "2.50x" in comparison.table([Row("eager", "prompt", 8, 5.0, 3.0), ours])
