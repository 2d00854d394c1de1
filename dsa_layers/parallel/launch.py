"""Starts a command as the ranks of one node, one process each, as torchrun does; rank 0 has the terminal.

torch's elastic multiprocessing starts the processes, sends their output where it belongs and ends them; the ranks meet
at a TCPStore of this process, as torchrun's do at one of its own. Waiting is done here, because its `wait` gives
hung processes 30 s and tells the order of ends to a second only. A few lines of Python before the command do what it
has no argument for: they empty the other ranks' standard input, and let no rank outlive this process (on Linux).
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_layers.arguments import shown

if TYPE_CHECKING:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.multiprocessing import PContext

HOST = "127.0.0.1"
STOP_SECONDS = 5  # from the signal that asks a rank to end until SIGKILL
# Where another rank has failed first, rank 0 has this long to end with the same code, and so to say it itself; and
# ranks that are ending, or that were the first to note a failure, have it to end.
RANK_0_SECONDS = 5
_POLL_SECONDS = 0.01
_LAST_LINES, _LAST_BYTES = 20, 2**14  # of a failed rank's standard error
_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
_PF_EXITING = 4  # Linux's flag of a process that ends, among those of /proc/PID/stat
_CAUSES = ("signal", "code", "abort")  # of an end, the likeliest first

# Runs before the command in each rank's process, without the site's packages, in 0.03 s. A preexec_fn could deadlock
# beside torch's threads.
_BEFORE = """
import ctypes, os, signal, sys
parent, rank, *command = sys.argv[1:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
if os.getppid() != int(parent):
    sys.exit(1)
if rank != "0":
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""


def launch(command: Sequence[str], ranks: int, told: Callable[[str, int], None] | None = None) -> int:
    """Runs `command`, a program and its arguments, in `ranks` processes, and returns the exit code when all have ended.

    Their environment is this process's and what `torch.distributed.init_process_group` reads: RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; of torch's C++ they say errors alone, unless
    TORCH_CPP_LOG_LEVEL asks for more. The port is a free one of 127.0.0.1, or that of
    MASTER_PORT in this process's environment. Rank 0 has this process's standard input, output and error; the others
    have an empty input, and their output is dropped.

    The code is 0 if all ranks' is. The first rank that fails ends the others: the code is its own, or 1 after a signal,
    and a line on the standard error tells of it below that rank's own last lines; `told` gets the line and the code.
    There is no such line where rank 0 has ended with that code: it has the terminal. After SIGINT, SIGTERM, SIGHUP and
    SIGQUIT, which the ranks get too, the code is 128 + the signal's number.

    ValueError for ranks that are no integer of at least 1, an empty command, and a MASTER_PORT that is none or that is
    in use; OSError where no process can be started.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks: must be an integer of at least 1, got {shown(ranks)}")
    if isinstance(command, str) or not command:
        raise ValueError(f"command: must be a program and its arguments, got {shown(command)}")
    # Imported late: it is slow, and a wrong call need not wait for it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

    store = _store()
    environment = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store either
        # torch's C++ would warn of NCCL's group, which is left to the process's end (`process_group.join`).
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # nobody reads it, or it is closed
            stream.flush()
    with tempfile.TemporaryDirectory(prefix="dsa-ranks-") as folder, _quiet_elastic(), _kept_handlers() as handlers:
        try:
            processes = start_processes(
                "rank",
                sys.executable,
                {rank: ("-I", "-S", "-c", _BEFORE, os.getpid(), rank, *command) for rank in range(ranks)},
                {rank: environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)},
                # What is not redirected is dropped for all ranks but those of the filter.
                DefaultLogsSpecs(folder, dict.fromkeys(range(1, ranks), Std.ERR), local_ranks_filter={0}),
            )
            received = _collect_signals(handlers)
        except SignalException as error:  # before all ranks were there; those that were end with this process
            return 128 + error.sigval
        try:
            failed = _wait(processes, received)
        finally:
            processes.close(received[0] if received else signal.SIGTERM, STOP_SECONDS)
        if received:
            return 128 + received[0]
        if failed is None:
            return 0
        code = _codes(processes)[failed]
        result = code if code > 0 else 1
        if code < 0 or failed > 0:
            line = _end_of(failed, code, ranks)
            _say(line, Path(processes.stderrs[failed]) if failed > 0 else None)
            if told is not None:
                told(line, result)
        return result


def _store() -> "TCPStore":
    """Listens before any rank exists, so that nobody else takes the port, and to this node alone: without a socket of
    its own a TCPStore listens to the network."""
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
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _codes(processes: "PContext") -> dict[int, int]:
    """Of the ranks that have ended: the exit code, or minus the signal's number."""
    codes = {rank: handler.proc.poll() for rank, handler in processes.subprocess_handlers.items()}
    return {rank: code for rank, code in codes.items() if code is not None}


def _wait(processes: "PContext", received: list[signal.Signals]) -> int | None:
    """Until all ranks have ended well or a signal has come: None; or until one has failed: its number.

    Of ranks that are found ended, or ending, at once, a signal is the cause: what other ranks make of a dead one is an
    error. SIGABRT is none: gloo and NCCL end processes by it whose peers have gone. Otherwise the cause is the rank
    that was the first to note what ends it (`note_failure`), whichever is the first to be gone.
    """
    while not received:
        ended = _codes(processes)
        if any(ended.values()):
            codes = _codes_of_ending(processes, received)
            failed = [rank for rank, code in codes.items() if code != 0]
            first = min(failed, key=lambda rank: (_CAUSES.index(_kind(codes[rank])), rank not in ended, rank))
            if _kind(codes[first]) != "signal":
                first = _first_to_note(processes, first, received)
            return 0 if _rank_0_ends_so_too(processes, _codes(processes)[first], received) else first
        if len(ended) == processes.nprocs:
            return None
        time.sleep(_POLL_SECONDS)
    return None


def _codes_of_ending(processes: "PContext", received: list[signal.Signals]) -> dict[int, int]:
    """`_codes` of the ranks that have ended by now, and of those that are ending, once they have ended.

    A rank's end closes its connections before it has an exit code: others may fail of that, and be found ended, first.
    Which ranks are ending is asked once, before any of them is waited for: one that ends later follows from a failure.
    """
    handlers = processes.subprocess_handlers.items()
    ranks = [rank for rank, handler in handlers if handler.proc.poll() is not None or _is_ending(handler.proc.pid)]
    _wait_for(processes, ranks, received)
    return {rank: code for rank, code in _codes(processes).items() if rank in ranks}


def _is_ending(pid: int) -> bool:
    """Whether a process is on its way out, by a flag that Linux sets before it closes what the process had open. False
    on other systems."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")  # behind its name, which may hold spaces
        return bool(int(fields.split()[6]) & _PF_EXITING)
    except OSError:
        return False


def _kind(code: int) -> str:
    return "code" if code > 0 else "abort" if code == -signal.SIGABRT else "signal"


def _first_to_note(processes: "PContext", failed: int, received: list[signal.Signals]) -> int:
    """The rank that has noted its failure before all others, once it has ended; `failed` where none has."""
    noted = {rank: Path(file).stat().st_mtime_ns for rank, file in processes.error_files.items() if Path(file).exists()}
    first = min(noted, key=lambda rank: (noted[rank], rank), default=failed)
    return first if _ends(processes, first, received) else failed


def _ends(processes: "PContext", rank: int, received: list[signal.Signals]) -> bool:
    """Whether a rank has failed within the time that rank 0 has for it."""
    _wait_for(processes, [rank], received)
    return _codes(processes).get(rank, 0) != 0


def _wait_for(processes: "PContext", ranks: list[int], received: list[signal.Signals]) -> None:
    """Until these have ended, or a signal has come, or for as long as rank 0 has for it."""
    until = time.monotonic() + RANK_0_SECONDS
    while not received and time.monotonic() < until and not _codes(processes).keys() >= set(ranks):
        time.sleep(_POLL_SECONDS)


def _rank_0_ends_so_too(processes: "PContext", code: int, received: list[signal.Signals]) -> bool:
    """Whether a rank's `code` is also rank 0's, so that what it has said on the terminal is enough. All ranks end alike
    after a wrong call. But 1 is also what a rank ends with because another has: there the first one is the cause."""
    if code <= 1:
        return False
    return _ends(processes, 0, received) and _codes(processes)[0] == code


def _end_of(rank: int, code: int, ranks: int) -> str:
    how = f"ended with exit code {code}" if code > 0 else f"was ended by {_name(-code)}"
    others = "; the other ranks have been stopped" if ranks > 1 else ""
    return f"rank {rank} of {ranks} {how}{others}"


def _say(line: str, log: Path | None) -> None:
    """To the standard error, below the last lines of a log."""
    with contextlib.suppress(OSError):  # nobody reads it
        if log is not None:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LAST_BYTES))
                for written in file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]:
                    print(written, file=sys.stderr)
        print(f"dsa: {line}", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last
        return f"signal {number}"


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """It would log each signal that it sends; what there is to say is said in one line at the end."""
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _kept_handlers() -> Iterator[dict[signal.Signals, Any]]:
    """The signals' handlers, which are back afterwards: elastic leaves its own behind."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield handlers
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _collect_signals(before: dict[signal.Signals, Any]) -> list[signal.Signals]:
    """The signals that come from now on. Elastic's handlers, which these replace, raise an exception wherever the
    process is, and do so too for what the caller has ignored, as nohup does with SIGHUP."""
    received: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            ignored = handler == signal.SIG_IGN
            signal.signal(number, signal.SIG_IGN if ignored else lambda n, _: received.append(signal.Signals(n)))
    return received
