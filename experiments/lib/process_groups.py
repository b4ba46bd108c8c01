"""Programs that start others: one that takes too long is ended with all of them."""

import os
import signal
import subprocess
from collections.abc import Sequence


def run_group(command: Sequence[str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end and keeps what it says.

    Raises:
        subprocess.TimeoutExpired: it took longer, and is ended with what it started.
    """
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True)
    try:
        out, errors = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        raise
    return subprocess.CompletedProcess(command, run.returncode, out, errors)
