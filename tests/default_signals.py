"""Default signal handling for processes that tests start. pytest may run under nohup, which ignores SIGHUP, or as a
script's background job, which ignores SIGINT. Processes that pytest starts inherit this."""

import signal


def reset_signals() -> None:
    """Let these signals end this process again. Pass this function to subprocess as `preexec_fn`."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
