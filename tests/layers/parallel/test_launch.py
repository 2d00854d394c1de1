"""`launch`: it sets the ranks' variables and streams, names the rank that failed first, and leaves no rank running."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from dsa_layers.parallel.launch import NUMBERS, first_failed, launch, note_failure, started_ranks
from tests.default_signals import reset_signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; PR_SET_PDEATHSIG exists on Linux only")

SECONDS = 120  # timeout; normally a command takes a few seconds
ROOT = str(Path(__file__).parents[3])
# The first lines of every rank's script. Its first argument is a folder for the ranks' process ids.
RANK = f"""
import os, signal, socket, sys, time
from pathlib import Path
sys.path.insert(0, {ROOT!r})
from dsa_layers.parallel.launch import note_failure
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
write_pid = lambda: (folder / str(rank)).write_text(str(os.getpid()))
def wait_for(*ranks):
    while not all((folder / str(rank)).exists() for rank in ranks): time.sleep(0.01)
"""
LAUNCHER = "import sys; from dsa_layers.parallel.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"


def command(folder, source):
    return [sys.executable, "-S", "-c", RANK + textwrap.dedent(source), str(folder)]


@pytest.fixture
def run(tmp_path):
    return lambda ranks, source, *arguments: launch([*command(tmp_path, source), *arguments], ranks)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a process that calls `launch`. The process is killed after the test."""
    processes = []

    def start_launcher(ranks, source, **options):
        call = [sys.executable, "-c", LAUNCHER, str(ranks), *command(tmp_path, source)]
        environment = os.environ | {"PYTHONPATH": ROOT, "TMPDIR": str(tmp_path)}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        options = {"env": environment, "text": True, "preexec_fn": reset_signals} | streams | options
        processes.append(subprocess.Popen(call, **options))
        return processes[-1]

    yield start_launcher
    for process in processes:
        with process:
            process.kill()


def wait_for(condition):
    until = time.monotonic() + SECONDS
    while not (value := condition()):
        assert time.monotonic() < until, "not in time"
        time.sleep(0.01)
    return value


def pids(folder, ranks):
    """Wait until all ranks have written their process ids to `folder`, and return the ids."""
    paths = [folder / str(rank) for rank in range(ranks)]
    return [int(wait_for(lambda path=path: path.exists() and path.read_text())) for path in paths]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_have_the_arguments_and_the_variables_of_torchrun(run, tmp_path):
    arguments = ["$$5", "${local_rank}", "$HOME", "", "a b\n", "é"]
    assert run(2, "(folder / str(rank)).write_text(repr((sys.argv[2:], dict(os.environ))))", *arguments) == 0
    ports = set()
    for rank in range(2):
        given, found = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert given == arguments
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (found["MASTER_ADDR"], found["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")
        assert (found["PATH"], found["TORCH_CPP_LOG_LEVEL"]) == (os.environ["PATH"], "ERROR")
        ports.add(int(found["MASTER_PORT"]))
    assert len(ports) == 1


def test_the_store_listens_to_this_node_only(run):
    """The launcher's TCPStore listens only on 127.0.0.1, so its port is still free on another address of this node."""
    source = """
        port = int(os.environ["MASTER_PORT"])
        socket.create_connection(("127.0.0.1", port))
        socket.create_server(("127.0.0.2", port))
    """
    assert run(1, source) == 0


def test_only_rank_0_has_the_terminal(start):
    source = """
        terminals = [os.isatty(fd) for fd in range(3)]
        sys.exit(terminals != [True] * 3 if rank == 0 else any(terminals) or sys.stdin.read() != "")
    """
    main, terminal = os.openpty()
    assert start(2, source, stdin=terminal, stdout=terminal, stderr=terminal).wait(SECONDS) == 0
    os.close(main)
    os.close(terminal)


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_failed_rank_is_named_below_its_last_lines(run, tmp_path, capfd, code):
    source = f"""
        write_pid()
        if rank != 1: time.sleep(600)
        wait_for(0, 2)
        for i in range(100): print("line", i, file=sys.stderr)
        sys.exit({code})
    """
    assert run(3, source) == code
    last = "".join(f"line {i}\n" for i in range(80, 100))
    message = f"dsa: rank 1 of 3 ended with exit code {code}; the other ranks have been stopped\n"
    assert capfd.readouterr().err == last + message
    assert not any(map(is_running, pids(tmp_path, 3)))


@pytest.mark.parametrize(
    ("name", "rank", "ranks", "others"),
    [
        ("SIGSEGV", 0, 1, ""),
        ("SIGKILL", 0, 2, "; the other ranks have been stopped"),
        ("SIGTERM", 1, 2, "; the other ranks have been stopped"),
    ],
)
def test_a_killed_rank_is_named(run, capfd, name, rank, ranks, others):
    assert run(ranks, f"if rank != {rank}: time.sleep(600)\nos.kill(os.getpid(), signal.{name})") == 1
    assert capfd.readouterr().err == f"dsa: rank {rank} of {ranks} was ended by {name}{others}\n"


@pytest.mark.parametrize("other", ["write_pid(); time.sleep(600)", "note_failure('wrong'); write_pid(); wait_for(0)"])
def test_there_is_no_line_after_what_rank_0_has_written(run, capfd, other):
    """If rank 0 exits with the code of the rank that failed first, and this code is above 1, `launch` prints nothing.
    After `note_failure`, rank 0 ignores the launcher's SIGTERM, so that it can print the cause."""
    source = f"""
        if rank:
            {other}
            sys.exit(7)
        wait_for(1, 2)
        note_failure("wrong")
        write_pid()
        time.sleep(1)
        print("wrong", file=sys.stderr)
        sys.exit(7)
    """
    assert run(3, source) == 7
    assert capfd.readouterr().err == "wrong\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ranks_get_a_signal_once_and_end(start, tmp_path, number):
    source = f"""
        def finish(*_):
            signal.signal({number}, signal.SIG_DFL)
            time.sleep(0.2)
            print("finished")
            sys.exit()

        signal.signal({number}, finish if rank == 0 else signal.SIG_IGN)
        write_pid()
        time.sleep(600)
    """
    process = start(2, source)
    ranks = pids(tmp_path, 2)
    process.send_signal(number)
    assert process.communicate(timeout=SECONDS) == ("finished\n", "")
    assert process.returncode == 128 + number
    assert not any(map(is_running, ranks))


def test_ranks_end_with_a_killed_launcher(start, tmp_path):
    process = start(2, "signal.signal(signal.SIGTERM, signal.SIG_IGN); write_pid(); time.sleep(600)")
    ranks = pids(tmp_path, 2)
    assert all(map(is_running, ranks))
    process.kill()
    wait_for(lambda: not any(map(is_running, ranks)))


def test_the_number_of_started_ranks_is_that_of_the_environment(monkeypatch):
    for name, value in zip(NUMBERS, ("1", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    assert started_ranks() == 2
    monkeypatch.delenv("RANK")
    assert started_ranks() is None


# {why rank 1 failed first: {rank: (exit code, second in which the launcher found the failure, time of `note_failure` in
# seconds or None)}}. The ranks are in the order in which the launcher found their failures.
SECOND_FAILED_FIRST = {
    "the launcher's SIGTERM is no cause": {1: (3, 100, None), 0: (-15, 100, None)},
    "the first SIGTERM is not the launcher's": {1: (-15, 100, None), 0: (1, 100, 100.4)},
    "a killed rank took 2 s to end": {0: (1, 100, 100.4), 1: (-9, 102, None)},
    "the launcher's SIGKILL is no cause": {1: (1, 100, 99.9), 0: (-9, 130, None)},
    "an abort follows from a lost connection": {0: (-6, 100, None), 1: (2, 101, None)},
    "the launcher's SIGKILL after a note is no cause": {1: (-9, 100, None), 0: (-9, 130, 100.4)},
    "an abort after a note": {0: (1, 100, 100.5), 1: (-6, 100, 100.4)},
    "noted 0.1 s earlier": {0: (1, 100, 100.5), 1: (1, 100, 100.4)},
    "noted beats not noted in the same second": {0: (1, 100, None), 1: (1, 101, 100.9)},
}


@pytest.mark.parametrize("ends", SECOND_FAILED_FIRST.values(), ids=SECOND_FAILED_FIRST)
def test_the_first_failed_rank_is_found(monkeypatch, tmp_path, ends):
    failures = {}
    for rank, (code, found, noted) in ends.items():
        path = tmp_path / str(rank)
        if noted is not None:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            monkeypatch.setattr("signal.signal", lambda *_: None)
            monkeypatch.setattr("time.time", lambda noted=noted: noted)
            note_failure("wrong")
        monkeypatch.setattr("time.time", lambda found=found: found)
        failures[rank] = ProcessFailure(rank, 1, code, str(path))
    assert first_failed(failures) == 1
