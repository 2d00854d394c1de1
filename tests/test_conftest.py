"""Tests of conftest.py and of the oneDNN limit in tests/__init__.py."""

import os
import random
import re
import subprocess
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch

from tests import conftest


@pytest.fixture(scope="module")
def shared():
    return torch.rand(4), random.random()


def drawn_from(seed):
    own = random.Random(seed)
    return torch.rand(4, generator=torch.Generator().manual_seed(seed)), own.random()


@pytest.mark.parametrize("before", [0, 3])
def test_numbers_are_a_tests_own(before, shared, request):
    """`shared` draws random numbers before the first of the two tests only."""
    numbers, number = drawn_from(zlib.crc32(request.node.nodeid.encode()))
    assert torch.equal(torch.rand(4), numbers) and random.random() == number
    numbers, number = drawn_from(0)
    assert torch.equal(shared[0], numbers) and shared[1] == number
    torch.rand(before)


class Item:
    def __init__(self, nodeid, slow):
        self.nodeid, self.slow = nodeid, slow

    def get_closest_marker(self, name):
        return self.slow if name == "slow" else None


def collected(monkeypatch, commit="", **options):
    options = {"all": False, "file_or_dir": []} | options
    monkeypatch.setattr(conftest, "commit", lambda: commit)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption=options.get, option=SimpleNamespace(**options), hook=hook)
    items = [Item(f"test_{i}", slow=i % 2 == 1) for i in range(60)]
    conftest.pytest_collection_modifyitems(config, items)
    return {item.nodeid for item in items}


def test_slow_tests_run_in_parts_that_rotate_by_commit(monkeypatch):
    fast, every = {f"test_{i}" for i in range(0, 60, 2)}, {f"test_{i}" for i in range(60)}
    runs = [collected(monkeypatch, str(commit)) for commit in range(200)]
    assert all(fast <= run < every for run in runs) and set().union(*runs) == every
    assert 1 / 40 < sum(len(run - fast) for run in runs) / (200 * 30) < 1 / 10
    assert collected(monkeypatch, all=True) == collected(monkeypatch, file_or_dir=["tests/test_it.py"]) == every


@pytest.mark.parametrize(
    ("given", "allowed"), [(None, "AVX-512|AVX2|AVX|SSE"), ("AVX2", "AVX2|AVX|SSE"), ("SSE41", "SSE")]
)
def test_onednn_uses_the_instructions_that_the_caller_allows(given, allowed):
    """With ONEDNN_VERBOSE=1, oneDNN prints the instruction set that it uses before its first primitive."""
    script = "import tests, torch; torch.conv2d(torch.ones(1, 64, 32, 32), torch.ones(64, 64, 3, 3))"
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment |= {"ONEDNN_VERBOSE": "1"} | ({"ONEDNN_MAX_CPU_ISA": given} if given else {})
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    (used,) = re.findall(r"^onednn_verbose.*,cpu,isa:(.*)$", done.stdout, re.M)
    assert re.match(f"(Intel )?({allowed})", used) and "AMX" not in used


def test_this_process_uses_the_instructions_that_its_caller_allows():
    """The suite can run again with ATEN_CPU_CAPABILITY=default. This limit must reach the process."""
    assert os.environ["ONEDNN_MAX_CPU_ISA"]
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
