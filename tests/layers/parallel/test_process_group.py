"""Joining and leaving the process group: a missing GPU is reported before ranks wait, and no gloo thread is left."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from dsa_layers.parallel.ranks import join

SECONDS = 300  # timeout; normally the test takes a few seconds
# The script of each rank. atexit runs the function that is registered first last, after the rank has left the group.
THREADS = """
    import atexit
    import gc
    from pathlib import Path

    def of_gloo():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        return sum("gloo" in name for name in names)

    atexit.register(lambda: print(f"left: {of_gloo()}\\n", end=""))
    from dsa_layers.parallel.ranks import join
    from dsa_layers.parallel.ranks import raise_on_all_ranks

    def run():
        ranks, _ = join("cpu")
        print(f"there: {of_gloo()}\\n", end="")
        with raise_on_all_ranks(ranks):
            if RAISES:
                raise RuntimeError("no memory")

    gc.disable()  # threads must not end only because of it
    try:
        run()
    except ValueError:
        raise SystemExit(1) from None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_no_thread_of_gloo_is_left_when_python_ends(raises, tmp_path):
    """A gloo thread that needs the interpreter while Python ends would abort the process."""
    (tmp_path / "rank.py").write_text(textwrap.dedent(THREADS).replace("RAISES", str(raises)))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", tmp_path / "rank.py"]
    done = subprocess.run(start, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == raises, done.stderr
    said = done.stdout.splitlines()
    assert "there: 0" not in said and said.count("left: 0") == 2, said


def test_a_missing_gpu_is_reported_before_ranks_wait(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("ranks are waited for"))
    with pytest.raises(ValueError, match=r"^gpus: rank 2 needs a GPU of its own, and torch sees 2$"):
        join("cuda")
