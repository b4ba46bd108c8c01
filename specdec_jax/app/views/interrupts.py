"""Ctrl-C while XLA compiles: Python sees a signal only when the call into C++ returns, which may take a minute."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_CODE = 130
PATIENCE = 0.5  # seconds to wait for KeyboardInterrupt


@contextlib.contextmanager
def interrupts_end_here() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; if that has not ended the block after PATIENCE, the process exits with 130.

    Restores the cursor, which a rich status hides. Only for work without unsaved results.
    """
    with interrupts_watched(_leave):
        yield


@contextlib.contextmanager
def interrupts_watched(late: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; `late` is called if that has not ended the block after PATIENCE.

    A thread receives the signal at once through the wake-up descriptor and calls `late`, while the main thread may be
    in a long call, or where Python drops exceptions (jax has a callback of the garbage collector). A dropped
    KeyboardInterrupt is raised at the end of the block. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left, pressed = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        with reader:
            while woken := reader.recv(1):
                if woken[0] == signal.SIGINT:
                    pressed.set()
                    if not left.wait(PATIENCE):
                        late()

    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    hook = sys.unraisablehook
    # the thread handles a KeyboardInterrupt that was dropped
    sys.unraisablehook = lambda each: None if isinstance(each.exc_value, KeyboardInterrupt) else hook(each)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
        if pressed.is_set():
            raise KeyboardInterrupt
    finally:
        left.set()
        sys.unraisablehook = hook
        signal.set_wakeup_fd(descriptor)
        writer.close()  # ends the thread


def _leave() -> None:
    if sys.stderr.isatty():
        os.write(2, b"\x1b[2K\r\x1b[?25h")  # clears the status line, shows the cursor
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)
