"""Start a command as the ranks of one node by torch's elastic launcher, as torchrun does. Rank 0 has the terminal.

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

from dsa_layers.arguments import shown

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
STOP_SECONDS = 5  # for ranks to end after a signal of the launcher
HOST = "127.0.0.1"
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
LOGGERS = "torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api"
Told = Callable[[str, int], None]
LAST_LINES = 20  # of a failed rank's standard error


def launch(command: Sequence[str], ranks: int, told: Told | None = None) -> int:
    """Run `command`, a program and its arguments, in `ranks` processes. Return the exit code after all have ended.

    The ranks have this process's environment and torchrun's variables. MASTER_PORT is a free port of 127.0.0.1, or the
    MASTER_PORT of this process. Rank 0 has this process's standard input, output and error. The other ranks have an
    empty input, and their output is dropped.

    If a rank fails, the others are stopped. The exit code is the failed rank's, or 1 if a signal killed it. The failed
    rank's last lines and a line that names the rank are written to standard error; `told` gets this line and the exit
    code. Nothing is written if rank 0 exits with this code itself, because rank 0 has the terminal; code 1 of another
    rank is always reported. If this process gets one of SIGNALS, it forwards the signal to the ranks, and the exit code
    is 128 + the signal's number.

    Call this function in the main thread. Raise ValueError for a wrong argument or MASTER_PORT, or for a port in use.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks: must be an integer of at least 1, got {shown(ranks)}")
    if isinstance(command, str) or not command or shutil.which(command[0]) is None:
        raise ValueError(f"command: must be an existing program and its arguments, got {shown(command)}")
    # These imports are slow, so wrong arguments fail before them.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(STOP_SECONDS)  # no parameter in torch 2.11
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
            # The filter drops the streams that are not redirected, except rank 0's.
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

    The launcher's own store would listen to the network. Because both have the same port, the launcher's store uses the
    server of this one.
    """
    from torch.distributed import TCPStore

    given = os.environ.get("MASTER_PORT", "0")
    if not (given.isdecimal() and int(given) < 2**16):
        raise ValueError(f"MASTER_PORT: must be a port's number, 0 for any free one, got {shown(given)}")
    try:
        listener = socket.create_server((HOST, int(given)))
    except OSError as error:
        raise ValueError(
            f"MASTER_PORT: port {given} of {HOST} cannot be used ({error.strerror}); must be a free port, or unset"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())


def _quiet_launcher() -> contextlib.ExitStack:
    """Silence the launcher's log. On exit, restore the log levels and the signal handlers."""
    restored = contextlib.ExitStack()
    for number in SIGNALS:
        restored.callback(signal.signal, number, signal.getsignal(number))
    for logger in map(logging.getLogger, LOGGERS):
        restored.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
    return restored


def _report(failures: dict[int, "ProcessFailure"], ranks: int, folder: Path, told: Told | None) -> int:
    """Write which rank failed, unless rank 0 has written why. Return the exit code."""
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
    """How many ranks were started together with this process; None where it was not started as one. ValueError for what
    is no number, and for a rank beyond the last one: the others would wait for one that never comes."""
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

    Call this function before the process ends, so that ranks that fail because of it note their failure later. After
    the call, SIGTERM does not end this process: the launcher sends SIGTERM to all ranks as soon as one has ended, but
    this rank has yet to print the cause. The launcher sends SIGKILL 30 s later.
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
    """Return the rank whose failure made the others fail. `failures` are in the order in which the launcher found them.

    A killed rank comes before ranks that failed by themselves, because those lost their connection to it. Between ranks
    that failed by themselves, the time of `note_failure` decides. Last come ranks that the launcher stopped, by SIGTERM
    or after STOP_SECONDS, and ranks that aborted: gloo and NCCL abort a process that lost a connection.
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
