"""What an ordinary run of the tests takes a sample of changes with every commit, so that all of it runs in time."""

import datetime
import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The hash of the commit that is checked out; the date where git cannot tell."""
    # As in a hook, where variables name a repository, and in a container, where another user owns the files.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.datetime.now(datetime.UTC).date().isoformat()
    return done.stdout.strip()
