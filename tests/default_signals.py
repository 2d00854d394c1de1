"""Default signal handling for processes that tests start. nohup makes a process ignore SIGHUP, and a script's
background jobs ignore SIGINT. Processes that pytest starts inherit this from pytest."""

import signal


def reset_signals() -> None:
    """Let SIGINT, SIGHUP and SIGTERM end this process again. Pass this function to subprocess as `preexec_fn`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
