"""Prepare this process as a rank and execute its command in it.

`launch` starts this file as a script without site-packages, so that the start is fast. The script gives ranks other
than 0 an empty standard input. On Linux it also makes the kernel kill the rank as soon as the process that called
`launch` has ended, even if SIGKILL killed that process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h: the signal that the kernel sends to this process when its parent ends

launcher, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
if os.getppid() != int(launcher):
    sys.exit(1)  # the launcher had already ended before prctl was called

if os.environ["RANK"] != "0":
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

# Silence torch's warning that the NCCL group is not destroyed; `ranks.join` explains why it is not.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.execvp(command[0], command)
