"""Pieces of work that one process holds at a time, and folders."""

import subprocess
import sys
import threading
import time

import pytest
from filelock import FileLock

from specdec_jax.locks import claimed, held, locked

WORKER = """
import sys
from pathlib import Path
from specdec_jax.locks import claimed
folder, who = Path(sys.argv[1]), sys.argv[2]
missing = lambda: [str(n) for n in range(40) if not (folder / f"{n}.done").exists()]
for name in claimed(folder, missing, look=0.01):
    with (folder / f"{name}.done").open("a") as file:
        file.write(who)
"""


def test_every_piece_is_done_once_whoever_does_it(tmp_path):
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), who]) for who in "abc"]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    done = [(tmp_path / f"{n}.done").read_text() for n in range(40)]
    assert all(len(who) == 1 for who in done)
    assert len(list(tmp_path.iterdir())) == 40  # no lock stays


def test_what_another_holds_is_waited_for_and_taken_when_it_lets_go_undone(tmp_path):
    done, lock = [], FileLock(tmp_path / ".b.lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.3, lock.release).start()
    begun = time.monotonic()
    for name in claimed(tmp_path, lambda: [piece for piece in "abc" if piece not in done], look=0.01):
        done.append(name)
        assert name != "b" or time.monotonic() - begun > 0.25
    assert sorted(done) == ["a", "b", "c"] and done[-1] == "b"


def test_an_error_lets_go_of_the_piece(tmp_path):
    with pytest.raises(OSError):
        for _ in claimed(tmp_path, lambda: ["a"]):
            raise OSError("full")
    assert not held(tmp_path / ".a.lock")
    pieces = claimed(tmp_path, lambda: ["a"])
    assert next(pieces) == "a" and held(tmp_path / ".a.lock")
    pieces.close()


def test_a_folder_is_one_processs(tmp_path):
    with locked(tmp_path / "a"):
        assert held(tmp_path / "a" / ".lock")
        with pytest.raises(BlockingIOError, match="in use by another process"), locked(tmp_path / "a"):
            pass
    assert not held(tmp_path / "a" / ".lock")
