"""`launch`: the environment and streams of ranks, the message about a failed rank, and that no rank is left."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dsa_layers.parallel.launch import launch
from tests.default_signals import reset_signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; PR_SET_PDEATHSIG exists on Linux only")

SECONDS = 120  # for what takes a few
ROOT = str(Path(__file__).parents[3])
# Every rank runs this first. The first argument is a folder, where each rank writes its process id.
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
    """Start a process that calls `launch`."""
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
    """Wait until all ranks have written their process ids."""
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
    """The same port of another address is free."""
    source = """
        port = int(os.environ["MASTER_PORT"])
        socket.create_connection(("127.0.0.1", port))
        socket.create_server(("127.0.0.2", port))
    """
    assert run(1, source) == 0


def test_only_rank_0_has_the_terminal(start):
    """The other ranks have an empty input."""
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
    """Even if another rank fails first: SIGTERM does not end rank 0 after `note_failure`."""
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
    """Rank 0 finishes; rank 1 ignores the signal and is killed."""
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
