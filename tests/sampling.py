"""What an ordinary run of the tests takes a sample of changes with every commit, so that all of it runs in time."""

import functools
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The hash of the commit that is checked out; "" where git cannot tell."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
