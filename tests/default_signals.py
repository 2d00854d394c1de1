"""Default signal handling for processes that tests start. A process started by nohup or as a script's background job
ignores SIGINT or SIGHUP, and its child processes inherit this."""

import signal


def reset_signals() -> None:
    """Let SIGINT, SIGHUP and SIGTERM end this process again. Pass this function to subprocess as `preexec_fn`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
