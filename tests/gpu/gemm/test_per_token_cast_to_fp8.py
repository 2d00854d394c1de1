"""The FP8 cast kernel against the reference on the GPU, and with powers of two on the CPU: bit for bit."""

import os
import subprocess
import sys

import pytest
import torch

import dsa
from dsa.reference.gemm import fp8_cast as reference
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import (
    assert_runs_have_the_same_bits,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)


def check(x, use_ue8m0, hadamard, record_error=None):
    poison_free_memory(mebibytes=64)
    q, scale = dsa.per_token_cast_to_fp8(x, use_ue8m0, hadamard=hadamard)
    # Without powers of two on the GPU: there PyTorch divides by 448 as the kernel does, and as it does for DeepGEMM.
    same = x.cpu() if use_ue8m0 else x
    expected_q, expected_scale = (t.cpu() for t in reference.per_token_cast_to_fp8(same, use_ue8m0, hadamard=hadamard))
    got, expected = q.cpu().float(), expected_q.float()
    if record_error and expected.numel():
        record_error((got - expected).abs().nan_to_num().max())
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(torch.signbit(got)[zeros], torch.signbit(expected)[zeros])


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 128), (3, 7168), (257, 640), (4096, 1536), (5, 64, 128)])
def test_bits(shape, dtype, use_ue8m0, hadamard, record_error):
    x = torch.randn(shape, device="cuda") * torch.logspace(-6, 4, shape[-2], device="cuda")[:, None]
    check(x.to(dtype), use_ue8m0, hadamard, record_error)


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_scales_at_every_power_of_two_and_beside_it(use_ue8m0, record_error):
    amax = 448.0 * torch.exp2(torch.arange(-24, 119, dtype=torch.float64)).float()
    amax = torch.stack([amax.nextafter(torch.zeros(1)), amax, amax.nextafter(torch.full((1,), torch.inf))])
    x = torch.rand(*amax.shape, 128) * 2 - 1
    x[..., 17] = 1.0
    check((x * amax[..., None]).cuda(), use_ue8m0, False, record_error)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("hadamard", [False, True])
def test_special_values(use_ue8m0, hadamard):
    x = torch.randn(8, 256, device="cuda").bfloat16()
    x[1] = 0.0
    x[2] = -0.0
    x[3, 5] = torch.nan
    x[4, 200] = torch.inf
    x[5, 7] = -torch.inf
    x[6] = torch.finfo(torch.bfloat16).tiny / 4
    x[7] = torch.finfo(torch.bfloat16).max
    check(x, use_ue8m0, hadamard)


def test_strided_rows_and_views():
    base = torch.randn(64, 3 * 512 + 8, device="cuda").bfloat16()
    check(base[:, 512:1024], True, False)
    check(base[::3, :512], False, False)
    check(torch.randn(6, 4, 384, device="cuda").bfloat16()[:, :, 128:256], True, True)


def test_offsets_beyond_32_bits():
    x = torch.zeros(340_000, 7168, device="cuda", dtype=torch.bfloat16)  # 2.4e9 elements
    x[-3:] = torch.randn(3, 7168, device="cuda").bfloat16()
    q, scale = dsa.per_token_cast_to_fp8(x)
    assert_same_bits((q[-3:].cpu(), scale[-3:].cpu()), reference.per_token_cast_to_fp8(x[-3:].cpu()))
    assert not q[1000].float().any()


def test_twenty_runs_are_identical():
    x = torch.randn(1000, 1536, device="cuda").bfloat16()
    assert_runs_have_the_same_bits(dsa.per_token_cast_to_fp8, x, False, hadamard=True)


def test_graph_replay_with_new_data():
    x = torch.randn(300, 512, device="cuda").bfloat16()
    for got in replays(dsa.per_token_cast_to_fp8, [x], lambda: torch.randn_like(x)):
        assert_same_bits([t.cpu() for t in got], reference.per_token_cast_to_fp8(x.cpu()))


def test_side_stream():
    x = torch.randn(4096, 7168, device="cuda").bfloat16()
    got = on_a_late_stream(lambda: x.mul_(2), dsa.per_token_cast_to_fp8, x)
    assert_same_bits([t.cpu() for t in got], reference.per_token_cast_to_fp8(x.cpu()))


@pytest.mark.several_gpus
def test_a_tensor_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.per_token_cast_to_fp8, torch.randn(4096, 7168, device="cuda").bfloat16())


def test_a_second_process_loads_the_kernel_from_disk(tmp_path):
    script = "import torch, dsa; print(dsa.per_token_cast_to_fp8(torch.ones(1, 128, device='cuda'))[1].item())"
    environment = {**os.environ, "DSA_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        assert float(out.stdout) == 2.0**-8
        (kernel,) = tmp_path.glob("*.o")
    first = kernel.stat().st_mtime_ns
    assert max(p.stat().st_mtime_ns for p in tmp_path.glob("*.o")) == first
