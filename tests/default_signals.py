"""Signals of processes that tests start. Under nohup, and in a script's background jobs, SIGINT and SIGHUP are ignored,
and every process inherits that from the one that starts it."""

import signal


def reset_signals() -> None:
    """Let these signals end this process again: a new process calls it first, as subprocess's preexec_fn."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
