"""Programs that start others: one that takes too long is ended with all of them."""

import os
import signal
import socket
import subprocess
from collections.abc import Sequence


def of_one_launch(count: int) -> list[dict[str, str]]:
    """The environment of each of so many processes that find each other on the loopback interface."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        shared = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": str(count)}
    return [os.environ | shared | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


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
