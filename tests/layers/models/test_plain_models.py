"""Trainable models, whose layers are not fused: torch.compile of the whole model, FSDP2, and adapters of peft."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dsa_layers import SequenceBatch, fused, load_model
from dsa_layers.models.registry import FAMILIES
from tests.layers.parallel.processes import in_ranks

LENS = [150, 90]  # more and fewer than the 128 keys that indexers select; V4's select 64 entries
TOKENS = torch.tensor([2 + i * i % 2000 for i in range(sum(LENS))])


def plain(directory):
    return load_model(directory, device="cpu", dtype=torch.float32, trainable=True, progress=False)


def loss_of(model):
    logits = model(TOKENS, SequenceBatch.without_cache(LENS), all_tokens=True)
    return torch.nn.functional.cross_entropy(logits, TOKENS.roll(-1))


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got, model):
    expected = loss_of(model)
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(got[0]), expected.detach())
    assert got[1].keys() == gradients(model).keys()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(params=FAMILIES)
def directory(request, tiny_checkpoint):
    return tiny_checkpoint(request.param, quantized=False)


@pytest.mark.slow
def test_a_model_compiles_without_a_graph_break(directory):
    torch._dynamo.reset()
    model = plain(directory)
    loss = torch.compile(loss_of, backend="aot_eager", fullgraph=True)(model)
    loss.backward()
    assert_same_step((loss.detach(), gradients(model)), plain(directory))


def sharded(ranks, directory):
    model = plain(directory)
    mesh = init_device_mesh("cpu", (ranks.size,))
    layers = model.model.layers if hasattr(model, "model") else model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: gradient.full_tensor() for name, gradient in gradients(model).items()}


@pytest.mark.slow
def test_a_model_sharded_by_fsdp2_has_the_same_gradients(directory):
    """FSDP2 averages gradients over ranks. All ranks have the same tokens, so the mean is one process's gradient."""
    for step in in_ranks(2, sharded, directory):
        assert_same_step(step, plain(directory))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v4"])
def test_only_adapters_learn_and_the_engine_s_form_has_them(model_type, tiny_checkpoint):
    peft = pytest.importorskip("peft")
    model = plain(tiny_checkpoint(model_type, quantized=False))
    targets = r".*(q_b_proj|kv_b_proj|o_proj|wq_b|wo_b|wkv|shared_experts\.\w+_proj)"
    if model_type == "deepseek_v4":
        targets = r".*attn\.(wq_a|wq_b|wo_b|wkv)"
    adapted = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), model)
    before = loss_of(adapted)
    optimiser = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        loss_of(adapted).backward()
        assert gradients(adapted) and all("lora_" in name for name in gradients(adapted))
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        after = loss_of(adapted)
        assert after < before - 0.05
        with fused(adapted):
            torch.testing.assert_close(loss_of(adapted), after, rtol=1e-4, atol=1e-4)
