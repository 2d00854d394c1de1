"""Registers per thread, bytes of stack per thread, bytes of static shared memory, and instructions of a kernel, read
from its cubin by cuobjdump."""

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
    """Return the path of the tool that the test extra installs, otherwise of the one in PATH."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) / "cu13" / "bin" / name for p in spec.submodule_search_locations] if spec else []
    found = next((str(place) for place in places if place.exists()), shutil.which(name))
    if found is None:
        raise FileNotFoundError(f"{name}: install the test extra (nvidia-cuda-{name})")
    return found


def disassemble(cubin: bytes) -> Sass:
    usage, sass = _cuobjdump(cubin, "-res-usage", "-sass")
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups())
    return Sass(registers, stack, shared, Counter(_names(sass)))


def instructions_in_order(cubin: bytes) -> list[list[str]]:
    """Return the names of each kernel's instructions."""
    (sass,) = _cuobjdump(cubin, "-sass")
    return [_names(kernel) for kernel in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]]


def _cuobjdump(cubin: bytes, *options: str) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        directory = str(Path(_tool("nvdisasm")).parent)
        run = functools.partial(
            subprocess.run, capture_output=True, text=True, check=True, env={"PATH": f"{directory}:/usr/bin:/bin"}
        )
        return [run([_tool("cuobjdump"), option, file.name]).stdout for option in options]


def _names(sass: str) -> list[str]:
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    return [name.partition(".")[0] for name in found]
