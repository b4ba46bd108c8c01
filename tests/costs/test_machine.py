"""What the machine says of itself."""

import jax
import pytest

from specdec_jax.costs import machine


def test_free_memory_is_the_least_that_is_said(monkeypatch, tmp_path):
    here = machine.free_memory()
    assert here is None or here > 0
    if jax.default_backend() != "cpu" or here is None:
        pytest.skip("the device says its own")
    monkeypatch.setattr(machine, "GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    assert machine.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 1e6
