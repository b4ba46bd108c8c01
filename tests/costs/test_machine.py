"""What the machine says of itself."""

import jax
import pytest

from specdec_jax.costs import machine


def test_free_memory_is_the_least_that_is_said(monkeypatch, tmp_path):
    here = machine.free_memory()
    assert here is None or here > 0
    if jax.default_backend() != "cpu" or here is None:
        pytest.skip("the device says its own")
    monkeypatch.setattr(machine, "GROUPS", {tmp_path: ("memory.max", "memory.current")})
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nfile 9\ninactive_file 100\nactive_file 30\n")
    assert machine.free_memory() == 2000 + 130  # files that were read are no reason to refuse anything
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.free_memory() > 1e6
