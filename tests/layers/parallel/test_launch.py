"""The ranks of a command: who has the terminal, who is blamed, and that none is left behind."""

import logging
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dsa_layers.parallel import launch as module
from dsa_layers.parallel.launch import launch
from tests.default_signals import reset_signals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and PR_SET_PDEATHSIG is Linux's")

# Processes that call launch, for what is done to these: torch is imported once, by the server that forks them.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed.elastic.multiprocessing", "dsa_layers.parallel.launch"])
SECONDS = 120  # for what takes one
EXIT = {"x86_64": 60, "aarch64": 93}  # the system call that ends a thread
RANK = "import os, signal, sys, time\nfrom pathlib import Path\nrank = int(os.environ['RANK'])\n"


def python(source):
    return [sys.executable, "-S", "-c", RANK + source]


def run(ranks, source):
    return launch(python(source), ranks)


def started(folder, ranks):
    """The ranks' process numbers, once all of them have written these down."""
    return [int(wait_for(lambda rank=rank: (folder / str(rank)).read_text())) for rank in range(ranks)]


# Renamed when it is whole.
WRITES_PID = (
    "path = Path(sys.argv[1], f'part{rank}')\n"
    "path.write_text(str(os.getpid()))\n"
    "path.rename(path.with_name(str(rank)))\n"
)


def wait_for(found, seconds=SECONDS):
    until = time.monotonic() + seconds
    while True:
        try:
            if value := found():
                return value
        except OSError:
            pass
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.01)


def running(pid):
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def has_children():
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def parent(command, ranks, streams, ignored):
    """The body of a process with these paths as its standard streams."""
    os.setsid()
    reset_signals()
    tempfile.tempdir = command[-1]  # a killed launcher's leftovers are removed with tmp_path
    for fd, (path, flags) in enumerate(streams):
        os.dup2(os.open(path, flags | os.O_CREAT, 0o600), fd)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(launch(command, ranks))


@pytest.fixture
def start(tmp_path):
    processes = []

    def start_parent(ranks, source, stdin=os.devnull, ignored=()):
        streams = (stdin, os.O_RDONLY), (tmp_path / "out", os.O_WRONLY), (tmp_path / "err", os.O_WRONLY)
        process = SERVER.Process(target=parent, args=([*python(source), str(tmp_path)], ranks, streams, ignored))
        process.start()
        processes.append(process)
        return process

    yield start_parent
    for process in processes:
        process.kill()
        process.join()


def ended(process, within=SECONDS):
    process.join(within)
    return process.exitcode


class TestEnvironment:
    def test_of_torchrun(self, tmp_path):
        source = (
            f"Path({str(tmp_path)!r}, str(rank)).write_text('\\n'.join(f'{{k}}={{v}}' for k, v in os.environ.items()))"
        )
        assert run(3, source) == 0
        ports = set()
        for rank in range(3):
            found = dict(line.split("=", 1) for line in (tmp_path / str(rank)).read_text().splitlines() if "=" in line)
            assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank))
            assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("3", "3")
            assert found["MASTER_ADDR"] == "127.0.0.1"
            assert found["PATH"] == os.environ["PATH"]
            assert found["TORCH_CPP_LOG_LEVEL"] == os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
            ports.add(int(found["MASTER_PORT"]))
        assert len(ports) == 1

    def test_port_listens_to_this_node_alone(self, capfd):
        """/proc/net: the local addresses and ports on which somebody listens (state 0A)."""
        source = (
            "port = format(int(os.environ['MASTER_PORT']), '04X')\n"
            "for name in ('tcp', 'tcp6'):\n"
            "    path = Path('/proc/net', name)\n"
            "    lines = path.read_text().splitlines()[1:] if path.exists() else []\n"
            "    for address, _, state in (line.split()[1:4] for line in lines):\n"
            "        if rank == 0 and state == '0A' and address.endswith(':' + port): print(address.partition(':')[0])"
        )
        assert run(1, source) == 0
        assert capfd.readouterr().out == "0100007F\n"

    def test_given_port(self, monkeypatch, capfd):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            monkeypatch.setenv("MASTER_PORT", port)
            with pytest.raises(ValueError, match=rf"^MASTER_PORT: port {port} of 127\.0\.0\.1 cannot be used \(.+\)"):
                run(1, "")
        for _ in range(2):  # also at once again
            assert run(1, "print(os.environ['MASTER_PORT'])") == 0
            assert capfd.readouterr().out == f"{port}\n"

    @pytest.mark.parametrize("port", ["http", "65536", "-1", ""])
    def test_given_port_that_is_none(self, monkeypatch, port):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=f"^MASTER_PORT: must be a port's number, .* got '{port}'"):
            run(1, "")


class TestStreams:
    def test_rank_0_has_them_unbuffered(self, start, tmp_path):
        """It answers each line of the input before the next one is written."""
        source = (
            "print('ready', rank, flush=True)\n"
            "for line in sys.stdin: print(rank, line.strip(), flush=True)\n"
            "print('error', rank, file=sys.stderr)"
        )
        os.mkfifo(tmp_path / "in")
        process = start(2, source, tmp_path / "in")
        with open(tmp_path / "in", "w") as stdin:
            said = "ready 0\n"
            for word in ("one", "two"):
                wait_for(lambda said=said: (tmp_path / "out").read_text() == said)
                print(word, file=stdin, flush=True)
                said += f"0 {word}\n"
            wait_for(lambda said=said: (tmp_path / "out").read_text() == said)
        assert ended(process) == 0
        assert (tmp_path / "out").read_text() == said
        assert (tmp_path / "err").read_text() == "error 0\n"

    def test_rank_0_sees_a_terminal(self):
        """As the progress bar and colours want it; of the other ranks' streams none is one."""
        source = "sys.exit(0 if all(os.isatty(fd) == (rank == 0) for fd in range(3)) else 3)"
        main, terminal = os.openpty()
        calls = f"import sys; from dsa_layers.parallel.launch import launch; sys.exit(launch({python(source)!r}, 2))"
        done = subprocess.run([sys.executable, "-c", calls], stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(main)
        os.close(terminal)
        assert done.returncode == 0

    def test_other_ranks_have_an_empty_input(self, start, tmp_path):
        (tmp_path / "in").write_text("for rank 0")
        process = start(3, "sys.exit(3 if rank and sys.stdin.read() else 0)", tmp_path / "in")
        assert ended(process) == 0

    def test_what_was_printed_before_comes_first(self, tmp_path):
        calls = f"from dsa_layers.parallel.launch import launch; print('first'); launch({python('print(2)')!r}, 1)"
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([sys.executable, "-c", calls], env=buffered, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("first\n2\n", "")


class TestFailure:
    @pytest.mark.parametrize("code", [1, 2, 130])
    def test_of_another_rank(self, capfd, monkeypatch, code):
        monkeypatch.setattr(module, "RANK_0_SECONDS", 0.5)
        monkeypatch.setattr(module, "STOP_SECONDS", 600)
        began = time.monotonic()
        source = (
            "if rank != 1: time.sleep(600)\n"
            "for i in range(100): print('line', i, file=sys.stderr)\n"
            f"print('output')\nsys.exit({code})"
        )
        assert run(3, source) == code
        assert time.monotonic() - began < 300
        lines = [f"line {i}" for i in range(80, 100)]
        told = f"dsa: rank 1 of 3 ended with exit code {code}; the other ranks have been stopped"
        assert capfd.readouterr() == ("", "\n".join([*lines, told, ""]))
        assert not has_children()

    def test_of_rank_0_is_told_by_itself(self, capfd):
        source = "if rank: time.sleep(600)\nprint('wrong', file=sys.stderr)\nsys.exit(7)"
        assert run(3, source) == 7
        assert capfd.readouterr() == ("", "wrong\n")

    @pytest.mark.parametrize("rank", [0, 2])
    def test_by_a_signal(self, capfd, monkeypatch, rank):
        """Of which nobody waits for rank 0 to say more, nor for ranks that SIGTERM ends."""
        monkeypatch.setattr(module, "RANK_0_SECONDS", 600)
        monkeypatch.setattr(module, "STOP_SECONDS", 600)
        began = time.monotonic()
        assert run(3, f"if rank != {rank}: time.sleep(600)\nos.kill(os.getpid(), signal.SIGKILL)") == 1
        assert time.monotonic() - began < 300
        told = f"dsa: rank {rank} of 3 was ended by SIGKILL; the other ranks have been stopped\n"
        assert capfd.readouterr() == ("", told)
        assert not has_children()

    @pytest.mark.parametrize("number, name", [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, "signal 35")])
    def test_of_the_only_rank_by_a_signal(self, capfd, number, name):
        assert run(1, f"os.kill(os.getpid(), {int(number)})") == 1
        assert capfd.readouterr().err == f"dsa: rank 0 of 1 was ended by {name}\n"

    @pytest.mark.skipif(platform.machine() not in EXIT, reason="the number of the system call is not known here")
    def test_of_a_peer_that_still_ends_is_the_cause(self, capfd, tmp_path):
        """A rank's end closes its pipe before it can be waited for. Here that takes half a second: its first thread is
        gone already, and another one closes the pipe, sleeps and kills the process."""
        os.mkfifo(tmp_path / "pipe")
        source = (
            "import ctypes, threading\n"
            f"path = {str(tmp_path / 'pipe')!r}\n"
            "if rank == 1:\n    open(path).read(); os.write(2, b'peer'); os._exit(1)\n"
            "if rank == 0:\n    time.sleep(600)\n"
            "def end(pipe):\n"
            "    while ' Z ' not in Path(f'/proc/{os.getpid()}/stat').read_text(): time.sleep(0.01)\n"
            "    pipe.close(); time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
            "threading.Thread(target=end, args=[open(path, 'w')]).start()\n"
            f"ctypes.CDLL(None).syscall({EXIT.get(platform.machine())}, 0)"
        )
        assert run(3, source) == 1
        told = "dsa: rank 2 of 3 was ended by SIGKILL; the other ranks have been stopped\n"
        assert capfd.readouterr().err == told

    def test_by_a_signal_is_the_cause_of_what_is_found_ended_with_it(self, capfd, monkeypatch):
        monkeypatch.setattr(module, "_POLL_SECONDS", 1)
        assert run(3, "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(1 if rank == 1 else 0)") == 1
        told = "dsa: rank 2 of 3 was ended by SIGKILL; the other ranks have been stopped\n"
        assert capfd.readouterr().err == told

    @pytest.mark.parametrize("cause", [0, 1])
    def test_that_is_noted_first_is_the_cause_of_what_ends_before_it(self, capfd, tmp_path, cause):
        """The other rank fails once the first one has noted its failure, and is gone while that one still ends."""
        source = (
            "import sys; sys.path[:0] = " + repr([str(Path(__file__).parents[3])]) + "\n"
            "from dsa_layers.parallel.environment import note_failure\n"
            f"path = Path({str(tmp_path)!r}, 'noted')\n"
            f"if rank == {cause}:\n"
            "    note_failure('out of memory'); print('out of memory', file=sys.stderr, flush=True)\n"
            "    path.touch(); time.sleep(0.5); sys.exit(1)\n"
            "while not path.exists(): time.sleep(0.01)\n"
            "time.sleep(0.05); note_failure('peer'); os._exit(1)"
        )
        assert launch([sys.executable, "-c", RANK + source], 2) == 1
        told = "dsa: rank 1 of 2 ended with exit code 1; the other ranks have been stopped\n"
        assert capfd.readouterr().err == "out of memory\n" + (told if cause else "")

    def test_ends_ranks_that_hold_on(self, capfd, monkeypatch, tmp_path):
        """One that ignores SIGTERM and one that is stopped, with a process of its own each."""
        monkeypatch.setattr(module, "STOP_SECONDS", 0.5)
        source = (
            "if rank == 2:\n"
            f"    while not all(Path({str(tmp_path)!r}, name).exists() for name in '01'): time.sleep(0.01)\n"
            "    sys.exit(1)\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"child = os.fork()\nif child: Path({str(tmp_path)!r}, str(rank)).write_text(str(child))\n"
            "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
            "time.sleep(600)"
        )
        began = time.monotonic()
        assert run(3, source) == 1
        assert time.monotonic() - began < 300
        assert not has_children()
        for child in started(tmp_path, 2):
            wait_for(lambda child=child: not running(child))

    def test_of_a_command_that_is_none(self, capfd):
        assert launch(["no-such-command"], 2) == 127
        assert capfd.readouterr().err == "no-such-command: No such file or directory\n"


class TestSignals:
    @pytest.mark.parametrize(
        ("number", "code", "to"),
        [
            (signal.SIGINT, 130, os.kill),
            (signal.SIGINT, 130, os.killpg),
            (signal.SIGTERM, 143, os.kill),
            (signal.SIGHUP, 129, os.kill),
        ],
    )
    def test_end_all_ranks(self, start, tmp_path, number, code, to):
        """Each rank gets it, once: the first lets them finish, and a second would end them."""
        source = (
            "def finish(*_):\n"
            f"    signal.signal({int(number)}, signal.SIG_DFL); time.sleep(0.2)\n"
            "    Path(sys.argv[1], 'end' + str(rank)).touch(); sys.exit(0)\n"
            f"signal.signal({int(number)}, finish)\n{WRITES_PID}time.sleep(600)"
        )
        process = start(2, source)
        pids = started(tmp_path, 2)
        to(process.pid, number)
        assert ended(process) == code
        assert not any(map(running, pids))
        assert all((tmp_path / f"end{rank}").exists() for rank in range(2))
        assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("", "")

    def test_what_the_caller_ignores_stays_ignored(self, start, tmp_path):
        source = f"{WRITES_PID}sys.stdin.read()"
        os.mkfifo(tmp_path / "in")
        process = start(1, source, tmp_path / "in", ignored=[signal.SIGHUP])
        with open(tmp_path / "in", "w"):
            started(tmp_path, 1)
            os.kill(process.pid, signal.SIGHUP)
            time.sleep(0.2)
            assert process.is_alive()
        assert ended(process) == 0

    def test_killed_parent_takes_its_ranks_along(self, start, tmp_path):
        process = start(2, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WRITES_PID}time.sleep(600)")
        pids = started(tmp_path, 2)
        assert all(map(running, pids))
        os.kill(process.pid, signal.SIGKILL)
        assert ended(process) == -signal.SIGKILL
        for pid in pids:
            wait_for(lambda pid=pid: not running(pid))

    def test_handlers_and_loggers_are_as_before(self):
        logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
        before = [*map(signal.getsignal, numbers), logger.level]
        assert run(2, "sys.exit(3)") == 3
        assert [*map(signal.getsignal, numbers), logger.level] == before


@pytest.mark.parametrize(
    ("command", "ranks", "problem"),
    [
        *((["true"], ranks, "ranks: must be an integer of at least 1") for ranks in (0, 1.0, "2", True)),
        *((command, 1, "command: must be a program and its arguments") for command in ([], "true")),
    ],
)
def test_wrong_arguments(command, ranks, problem):
    with pytest.raises(ValueError, match=f"^{problem}, got "):
        launch(command, ranks)
