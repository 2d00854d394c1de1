"""The commit hash. Without --all, it selects samples of the slow tests and kernel variants. So runs at later commits
use other samples."""

import datetime
import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """Return the hash of the checked-out commit, or today's date if git fails."""
    # In a git hook, GIT_ variables can name another repository. In a container, another user may own the files, and git
    # refuses these without safe.directory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.datetime.now(datetime.UTC).date().isoformat()
    return done.stdout.strip()
