"""Start a command as several ranks on one node with torch's elastic launcher, as torchrun does. Rank 0 uses the
terminal.

Importing this module does not import torch.
"""

import collections
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # environment variables that launchers such as torchrun set for a rank
STOP_SECONDS = 5  # how long the launcher waits for signalled ranks to end before it kills them
HOST = "127.0.0.1"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
LAST_LINES = 20  # lines of a failed rank's standard error that are shown


def launch(command: Sequence[str], ranks: int, told: Callable[[str, int], None] | None = None) -> int:
    """Run `command`, a program and its arguments, in `ranks` processes. Return the exit code after all processes have
    ended.

    The ranks have this process's environment and torchrun's variables. Rank 0 has this process's standard input, output
    and error. The other ranks have an empty input. Their output is dropped; each one's standard error goes to a file.

    If a rank fails, the launcher stops the other ranks. If several fail, `first_failed` chooses the failed rank. The
    exit code is the failed rank's exit code, or 1 if a signal killed this rank. This process writes to standard error
    the last lines of the rank's file and a line that names the rank, and calls `told` with that line and the exit code.
    This process does neither if rank 0 has printed the cause: if the failed rank is rank 0 and no signal killed it, or
    if rank 0 has the failed rank's exit code and this code is above 1.

    If this process receives a signal in SIGNALS and does not ignore it, the process forwards the signal to the ranks,
    and the exit code is 128 + the signal's number.

    Call this function in the main thread, because it replaces the handlers of SIGNALS. It also silences the loggers of
    torch's launcher.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    for logger in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{logger}").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(STOP_SECONDS)  # torch 2.11 has no parameter for this timeout
    start_rank = ["-I", "-S", str(Path(__file__).with_name("start_rank.py")), str(os.getpid())]
    arguments = [argument.replace("$", "$$") for argument in command]  # the launcher substitutes ${local_rank}
    # The launcher's own store would accept connections from other nodes. Stores of one process with the same port share
    # one server, so the launcher's store shares the server of this store, to which only this node can connect.
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(HOST, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
    with tempfile.TemporaryDirectory(prefix="dsa-ranks-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            max_restarts=0,
            run_id="dsa",
            rdzv_backend="static",
            rdzv_endpoint=f"{HOST}:{store.port}",
            rdzv_configs={"rank": 0},
            monitor_interval=0.01,
            signals_to_handle=",".join(n.name for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN),
            # Streams that are not redirected are dropped for all ranks except rank 0.
            logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(range(1, ranks), Std.ERR), local_ranks_filter={0}),
        )
        try:
            launch_agent(config, sys.executable, [*start_rank, *arguments])
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            return _report(error.failures, ranks, Path(folder), told)
    return 0


def _report(
    failures: dict[int, "ProcessFailure"], ranks: int, folder: Path, told: Callable[[str, int], None] | None
) -> int:
    """Report the failed rank as `launch` describes, and return the exit code."""
    rank = first_failed(failures)
    code = failures[rank].exitcode
    if code > 0 and (rank == 0 or (code > 1 and 0 in failures and failures[0].exitcode == code)):
        return code

    for path in folder.glob(f"*/*/{rank}/stderr.log"):
        with path.open(errors="replace") as log:
            for written in collections.deque(log, LAST_LINES):
                print(written.rstrip("\n"), file=sys.stderr)
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {failures[rank].signal_name()}"
    line = f"rank {rank} of {ranks} {how}" + ("; the other ranks have been stopped" if ranks > 1 else "")
    print(f"dsa: {line}", file=sys.stderr, flush=True)
    if told is not None:
        told(line, max(code, 1))
    return max(code, 1)


def started_ranks() -> int | None:
    """Return WORLD_SIZE, the number of ranks that a launcher has started, including this process. Return None if a
    variable in NUMBERS is not set, because then this process is not a rank."""
    if any(name not in os.environ for name in NUMBERS):
        return None
    return int(os.environ["WORLD_SIZE"])


def note_failure(problem: str) -> None:
    """Write the cause of this process's failure to torchrun's error file, if this process is a rank.

    Call this function as soon as the failure is known: `first_failed` compares the times of the calls. After the call,
    a rank ignores SIGTERM, because it still has to print the cause. The launcher sends SIGTERM to the other ranks when
    a rank has failed, and SIGKILL STOP_SECONDS later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(path).write_text(json.dumps({"message": problem, "timestamp": time.time()}), encoding="utf-8")


def first_failed(failures: dict[int, "ProcessFailure"]) -> int:
    """Return the rank that failed first, and so probably caused the other failures. `failures` are in the order in
    which the launcher found them.

    A rank that called `note_failure` failed at the time of the call. Any other rank failed when the launcher found its
    failure, or STOP_SECONDS earlier if a signal killed the rank, because a killed process can take that long to end.
    Two kinds of ranks without `note_failure` are chosen last: ranks that SIGTERM ended, unless the launcher found them
    first, and ranks that aborted, because gloo and NCCL abort a process that has lost a connection.
    """
    found_first = next(iter(failures))

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        noted = failure.error_file_data.get("timestamp")
        if noted is not None:
            return False, noted
        stopped = failure.exitcode == -signal.SIGTERM and rank != found_first
        found = failure.timestamp + 1  # torch rounds the timestamp down to seconds
        return stopped or failure.exitcode == -signal.SIGABRT, found - STOP_SECONDS * (failure.exitcode < 0)

    return min(failures, key=order)
