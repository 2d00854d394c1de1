"""Memory of the host that a rank needs while its part of a model goes to a GPU: for that one tensors on meta stand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsa_layers.io.directory import SINGLE_NAME

# Of each tensor a half, as one of two ranks reads it: rows of some, columns of the others. Memory of the process's own
# is counted: pages of the mapped file are the system's, which takes them back.
LOADS = """
import re, sys, threading, time
from pathlib import Path
import torch
from dsa_layers.io.weights import load_weights

def own():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def parts_of(name, shape):
    if "." in name:
        return {name: ()}
    half = slice(0, shape[0] // 2), slice(0, shape[1] // 2)
    index = half[:1] if name.startswith("rows") else (slice(None), half[1])
    rest = (slice(shape[0] // 2, None),) if name.startswith("rows") else (slice(None), slice(shape[1] // 2, None))
    return {f"{name}.own": index, f"{name}.other": rest}

def holder(name, shape):
    part = torch.nn.Module()
    part.own = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
    part.other = torch.nn.Parameter(part.own.clone(), requires_grad=False)
    return part

model, (directory, rows, columns) = torch.nn.Module(), (sys.argv[1], *map(int, sys.argv[2:]))
for i in range(3):
    model.add_module(f"rows{i}", holder(f"rows{i}", (rows // 2, columns)))
    model.add_module(f"columns{i}", holder(f"columns{i}", (rows, columns // 2)))
before, most, ended = own(), [0], threading.Event()

def watch():
    while not ended.is_set():
        most[0] = max(most[0], own())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
load_weights(model, directory, device="meta", parts_of=parts_of, progress=False)
ended.set()
thread.join()
print(max(most[0], own()) - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
def test_it_is_no_more_than_the_largest_tensor(tmp_path):
    rows, columns = 4096, 4096
    tensors = {f"{kind}{i}": torch.ones(rows, columns).bfloat16() for kind in ("rows", "columns") for i in range(3)}
    save_file(tensors, tmp_path / SINGLE_NAME)
    call = [sys.executable, "-c", LOADS, str(tmp_path), str(rows), str(columns)]
    done = subprocess.run(call, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.2 * 2 * rows * columns
