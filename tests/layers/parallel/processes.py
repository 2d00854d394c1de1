"""Helper that runs a function in several processes, which communicate through gloo."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dsa_layers.parallel.ranks import Ranks

SECONDS = 400  # timeout of `in_ranks`: ranks that wait for each other never end
# Importing these modules takes seconds. A fork server imports them once, and ranks are its forks.
IMPORTED = ["torch", "torch.distributed", "dsa_layers", "dsa_layers.parallel.ranks"]


def in_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run function(ranks, *arguments) in `size` processes; `ranks` is the process's `Ranks`. Return the results in the
    ranks' order. The processes import `function` by its name, so define it at the top level of a module."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(IMPORTED)
        arguments = size, folder, dict(os.environ), function, arguments
        running = mp.start_processes(_run, arguments, nprocs=size, join=False, start_method="forkserver")
        until = time.monotonic() + SECONDS
        while not running.join(timeout=5):
            if time.monotonic() > until:
                for process in running.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__}: {size} ranks have not ended within {SECONDS} s")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(size)]


def _run(
    rank: int,
    size: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # drop the variables of the fork server, which may be older than `environment`
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(function(Ranks.of(), *arguments), Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()
