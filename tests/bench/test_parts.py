"""The time of the GPU's work by part of the model."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dsa_bench.e2e.parts import GLUE, PARTS, _announced, by_part, glue, in_turn
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io.loading import load_model


def range_of(name, start, end):
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start}


def launch(correlation, ts, kind="cuda_runtime"):
    return {"cat": kind, "name": "cudaLaunchKernel", "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation, ms, kind="kernel"):
    ts = 10**6 * correlation
    return {"cat": kind, "name": "k", "ts": ts, "dur": 1000 * ms, "args": {"correlation": correlation}}


def test_the_wait_for_the_previous_kernel_is_not_a_kernels_time():
    spans = [(0, 10), (8, 14), (9, 13), (14, 15), (20, 26)]
    work = [{"cat": "kernel", "name": str(i), "ts": a, "dur": b - a} for i, (a, b) in enumerate(spans)]
    assert [(e["name"], us) for e, us in in_turn(work[::-1])] == [("0", 10), ("1", 4), ("2", 0), ("3", 1), ("4", 6)]


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch():
    events = [
        *(range_of("part: attention", 10, 50), range_of("part: indexer", 20, 40), range_of("part: top-k", 30, 35)),
        *(range_of("part: MoE", 60, 70), range_of("another", 0, 100)),
        *(launch(1, 5), launch(2, 15), launch(3, 25, "cuda_driver"), launch(4, 32), launch(5, 38), launch(6, 45)),
        *(launch(7, 65), launch(8, 71), {"cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}),
        *(kernel(i, 2**i, "gpu_memcpy" if i == 8 else "kernel") for i in range(1, 9)),
    ]
    parts = {"indexer": 2**3 + 2**5, "top-k": 2**4, "attention": 2**2 + 2**6, "MoE": 2**7, "rest": 2**1 + 2**8}
    assert by_part(events) == parts
    with pytest.raises(ValueError, match="k: the trace has no launch of this kernel"):
        by_part([kernel(1, 1.0)])


def test_glue_is_not_a_part_of_the_model():
    """Glue is code that only converts tensors for the peers."""
    experts = [range_of("part: MoE", 10, 50), launch(1, 15), kernel(1, 2), launch(2, 25), kernel(2, 4)]
    assert by_part(experts) == dict.fromkeys(PARTS, 0.0) | {"MoE": 6}
    with profile(activities=[ProfilerActivity.CPU]) as recorded, glue():
        pass
    (named,) = {event.key for event in recorded.key_averages() if event.key.startswith("part: ")}
    assert by_part([*experts, range_of(named, 20, 30)]) == dict.fromkeys(PARTS, 0.0) | {"MoE": 2, GLUE: 4}


@pytest.mark.slow
def test_every_layer_of_a_model_announces_its_parts(checkpoint, tmp_path):
    model = load_model(checkpoint, device="cpu", progress=False)
    call = torch.inference_mode()(lambda: model(torch.arange(200), SequenceBatch.without_cache([200])))

    def counts():
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            call()
        recorded.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
        return {part: names.count(f"part: {part}") for part in PARTS}

    with _announced(model):
        assert counts() == {"indexer": 4, "top-k": 4, "attention": 4, "MoE": 3, "rest": 0}
    assert counts() == dict.fromkeys(PARTS, 0)
