"""The FP8 cast on the GPU: the bits of the reference, with powers of two those of the reference on the CPU."""

import os
import subprocess
import sys

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("per_token_cast_to_fp8")


def check(x, use_ue8m0=True, hadamard=False):
    given = {"x": x, "use_ue8m0": use_ue8m0, "gran_k": 128, "hadamard": hadamard}
    poison_free_memory(mebibytes=64)
    CASE.check(given, CASE.run(given))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 128), (3, 7168), (257, 640), (4096, 1536), (5, 64, 128)])
def test_bits(shape, dtype, use_ue8m0, hadamard, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", shape=shape, dtype=dtype, use_ue8m0=use_ue8m0, hadamard=hadamard))


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_scales_at_and_next_to_every_power_of_two(use_ue8m0):
    amax = 448.0 * torch.exp2(torch.arange(-24, 119, dtype=torch.float64)).float()
    amax = torch.stack([amax.nextafter(torch.zeros(1)), amax, amax.nextafter(torch.full((1,), torch.inf))])
    x = torch.rand(*amax.shape, 128) * 2 - 1
    x[..., 17] = 1.0
    check((x * amax[..., None]).cuda(), use_ue8m0)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("hadamard", [False, True])
def test_special_values(use_ue8m0, hadamard):
    x = torch.randn(8, 256, device="cuda").bfloat16()
    x[1], x[2] = 0.0, -0.0
    x[3, 5], x[4, 200], x[5, 7] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = torch.finfo(torch.bfloat16).tiny / 4, torch.finfo(torch.bfloat16).max
    check(x, use_ue8m0, hadamard)


def test_strided_rows_and_views():
    base = torch.randn(64, 3 * 512 + 8, device="cuda").bfloat16()
    check(base[:, 512:1024])
    check(base[::3, :512], use_ue8m0=False)
    check(torch.randn(6, 4, 384, device="cuda").bfloat16()[:, :, 128:256], hadamard=True)


def test_offsets_beyond_32_bits():
    x = torch.zeros(340_000, 7168, device="cuda", dtype=torch.bfloat16)  # 2.4e9 elements
    x[-3:] = torch.randn(3, 7168, device="cuda").bfloat16()
    q, scale = dsa.per_token_cast_to_fp8(x)
    assert_same_bits((q[-3:], scale[-3:]), dsa.per_token_cast_to_fp8(x[-3:].clone()))
    assert not q[1000].float().any()


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
