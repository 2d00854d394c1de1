"""Start a command as several ranks on one node with torch's elastic launcher, as torchrun does. Rank 0 uses the
terminal.

Importing this module does not import torch.
"""

import collections
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
STOP_SECONDS = 5  # the time that ranks have to end after the launcher signals them
HOST = "127.0.0.1"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
LOGGERS = "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api"
Told = Callable[[str, int], None]
LAST_LINES = 20  # lines of a failed rank's standard error that are shown


def launch(command: Sequence[str], ranks: int, told: Told | None = None) -> int:
    """Run `command`, a program and its arguments, in `ranks` processes. Return the exit code after all processes have
    ended.

    The ranks have this process's environment and torchrun's variables. Their MASTER_PORT is this process's MASTER_PORT
    if it is set, otherwise a free port of 127.0.0.1. Rank 0 has this process's standard input, output and error. The
    other ranks have an empty input, and their output is dropped.

    If a rank fails, the launcher stops the other ranks. The exit code is the failed rank's exit code, or 1 if a signal
    killed it. This process writes the failed rank's last lines and a line that names the rank to standard error. Then
    it calls `told` with that line and the exit code. It writes nothing if rank 0 itself exits with this code, because
    rank 0 has printed the cause on the terminal. It always reports another rank that exits with code 1.

    If this process receives one of SIGNALS, it forwards the signal to the ranks, and the exit code is 128 + the
    signal's number.

    Call this function in the main thread. Raise ValueError if an argument or MASTER_PORT is wrong, or if the port is in
    use.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks: must be an integer of at least 1, got {ranks!r}")
    if isinstance(command, str) or not command or shutil.which(command[0]) is None:
        raise ValueError(f"command: must be an existing program and its arguments, got {command!r}")
    # These imports are slow, so the arguments are checked first.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(STOP_SECONDS)  # torch 2.11 has no parameter for it
    start_rank = ["-I", "-S", str(Path(__file__).with_name("start_rank.py")), str(os.getpid())]
    arguments = [argument.replace("$", "$$") for argument in command]  # the launcher substitutes ${local_rank}
    store = _store()
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
            with _quiet_launcher():
                launch_agent(config, sys.executable, [*start_rank, *arguments])
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            return _report(error.failures, ranks, Path(folder), told)
    return 0


def _store() -> "TCPStore":
    """Return a store that only this node can connect to.

    The launcher creates a store too, and that store's server would listen to the network. The launcher gets the port of
    this store, and two stores of one process with the same port share one server.
    """
    from torch.distributed import TCPStore

    given = os.environ.get("MASTER_PORT", "0")
    if not (given.isdecimal() and int(given) < 2**16):
        raise ValueError(f"MASTER_PORT: must be a port's number, 0 for any free one, got {given!r}")
    try:
        listener = socket.create_server((HOST, int(given)))
    except OSError as error:
        raise ValueError(
            f"MASTER_PORT: port {given} of {HOST} cannot be used ({error.strerror}); must be a free port, or unset"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())


def _quiet_launcher() -> contextlib.ExitStack:
    """Silence the launcher's loggers. Return a context that restores the log levels and the signal handlers on exit."""
    restored = contextlib.ExitStack()
    for number in SIGNALS:
        restored.callback(signal.signal, number, signal.getsignal(number))
    for logger in map(logging.getLogger, LOGGERS):
        restored.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
    return restored


def _report(failures: dict[int, "ProcessFailure"], ranks: int, folder: Path, told: Told | None) -> int:
    """Report the failed rank on standard error, unless rank 0 has printed the cause. Return the exit code."""
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
    result = max(code, 1)
    if told is not None:
        told(line, result)
    return result


def started_ranks() -> int | None:
    """Return WORLD_SIZE, the number of ranks that a launcher has started together with this process. Return None if a
    variable of NUMBERS is not set, because this process is not a rank then.

    Raise ValueError if one of these variables or MASTER_PORT is not a number, or if RANK is not below WORLD_SIZE. With
    such a RANK, the other ranks would wait indefinitely for a missing rank.
    """
    if any(name not in os.environ for name in NUMBERS):
        return None
    for name in (*NUMBERS, "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise ValueError(f"{name}: must be a number, got {os.environ[name]!r}")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= ranks:
        raise ValueError(f"RANK: must be below WORLD_SIZE={ranks}, got {rank}")
    return ranks


def note_failure(problem: str) -> None:
    """Write the cause of this process's failure to torchrun's error file, if this process is a rank.

    Call this function before the process ends. Other ranks may fail because this process ends; they then note their
    failures later. After the call, this process ignores SIGTERM: the launcher sends SIGTERM to all ranks as soon as one
    rank has ended, but this rank still has to print the cause. The launcher sends SIGKILL 30 s later.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = Path(f"{path}.part")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"message": problem, "timestamp": time.time()}), encoding="utf-8")
        part.replace(path)


def first_failed(failures: dict[int, "ProcessFailure"]) -> int:
    """Return the rank that caused the other ranks' failures. `failures` are in the order in which the launcher found
    them.

    A rank that a signal killed is chosen before ranks that exited with an error, because these may have lost their
    connection to the killed rank. Among ranks that exited with an error, the rank that called `note_failure` first is
    chosen. Two kinds of ranks are chosen last: ranks that the launcher stopped, by SIGTERM or after STOP_SECONDS, and
    ranks that aborted, because gloo and NCCL abort a process that has lost a connection.
    """
    found_first = next(iter(failures))
    began = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, float]:
        failure = failures[rank]
        noted = failure.error_file_data.get("timestamp")
        if noted is not None:
            return False, True, noted

        late = failure.timestamp >= began + STOP_SECONDS
        stopped = rank != found_first and (late or failure.exitcode == -signal.SIGTERM)
        return stopped or failure.exitcode == -signal.SIGABRT, failure.exitcode > 0, failure.timestamp + 1

    return min(failures, key=order)
