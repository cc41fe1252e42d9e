"""Children of the supervisor end with it, even when it was killed and could not stop them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: The supervisor sets it for its children: its own process id.
SUPERVISOR_VARIABLE = "SHEAF_SUPERVISOR_PID"
#: Linux' prctl(2) option: the signal that a process gets when its parent dies; it is kept over an exec.
PR_SET_PDEATHSIG = 1

# Taken out at once: whatever else a child starts is nobody's child of the supervisor's.
_supervisor = os.environ.pop(SUPERVISOR_VARIABLE, None)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the supervisor dies; nothing without one, or on another system."""
    if _supervisor is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != int(_supervisor):
        # It died before we asked.
        os.kill(os.getpid(), number)
