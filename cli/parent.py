"""Children of the supervisor end with it, even when it was killed and could not stop them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: The supervisor sets it for its children: its own process id.
SUPERVISOR_VARIABLE = "SHEAF_SUPERVISOR_PID"
#: Linux' prctl(2) option: the signal that a process gets when its parent dies.
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the supervisor dies; nothing without one, or on another system."""
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(supervisor):
        # It died before we asked.
        os.kill(os.getpid(), signal.SIGTERM)
