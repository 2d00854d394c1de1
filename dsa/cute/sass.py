"""What a kernel's machine code says: registers, stack, shared memory and the instructions in it."""

import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sass:
    registers: int
    stack: int
    shared: int
    instructions: Counter


@functools.cache
def _tool(name: str) -> str:
    """cuobjdump or nvdisasm: what the test extra installs, else a CUDA toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) / "cu13" / "bin" / name for p in spec.submodule_search_locations] if spec else []
    found = next((str(place) for place in places if place.exists()), shutil.which(name))
    if found is None:
        raise FileNotFoundError(f"{name}: install the test extra (nvidia-cuda-{name})")
    return found


def disassemble(cubin: bytes) -> Sass:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        directory = str(Path(_tool("nvdisasm")).parent)
        run = functools.partial(
            subprocess.run, capture_output=True, text=True, check=True, env={"PATH": f"{directory}:/usr/bin:/bin"}
        )
        usage = run([_tool("cuobjdump"), "-res-usage", file.name]).stdout
        sass = run([_tool("cuobjdump"), "-sass", file.name]).stdout
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups())
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    return Sass(registers, stack, shared, Counter(name.partition(".")[0] for name in names))
