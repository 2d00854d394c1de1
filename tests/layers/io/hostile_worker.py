"""Loads each directory in the directory that is its argument, within 1.5 GB more than it begins with, and prints for
each how that ended: a JSON line of its name, the exception's type, the message and the seconds of computing. The first
line is the seconds of ten million steps of Python, which say how fast the machine is."""

import json
import resource
import sys
import time
from pathlib import Path

import torch

from dsa_layers.io.loading import load_model

MAX_MEMORY = 1_500_000_000


def main() -> None:
    with torch.device("meta"):
        torch.nn.Embedding(2, 2)  # the first one imports much
    status = Path("/proc/self/status")
    if status.exists():  # Linux
        used = int(status.read_text().partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_MEMORY, -1))
    before = time.process_time()
    steps = 0
    while steps < 10_000_000:
        steps += 1
    print(time.process_time() - before)
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        before = time.process_time()
        try:
            load_model(directory, progress=False)
            kind, message = "none", ""
        except BaseException as error:
            kind, message = type(error).__name__, str(error)
        seconds = time.process_time() - before
        print(json.dumps([directory.name, kind, message, seconds]), flush=True)


if __name__ == "__main__":
    main()
