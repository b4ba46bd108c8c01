"""`python -m experiments.entropy siblings`: its table, from made-up traces and from files."""

import pytest

from experiments import entropy
from experiments.lib.smoke import made_up_trace
from specdec_jax.replay.trace import save_trace


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    out = tmp_path_factory.mktemp("siblings") / "run"
    assert entropy.main(["siblings", "--smoke", "--out", str(out)]) == 0
    return (out / "table.md").read_text()


@pytest.mark.seldom
def test_chances_stand_by_depth_entropy_and_task(table):
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in table.splitlines() if line.startswith("|")}
    assert {"anywhere", "draft 1", "0 to 0.5 nats", "4 or more nats", "code"} <= set(lines)
    second, third = (float(cell.split()[0]) for cell in lines["anywhere"][1:3])
    assert abs(second - 0.3) < 0.1 and abs(third - 0.15 / 0.7) < 0.1  # as the traces are made up


def test_the_rules_are_replayed_on_every_machine_and_free_verification_gains_most(table):
    assert all(
        table.count(f"| {name}") == 2 for name in ("the default costs (2 cores", "flat verification", "tpu-v5e")
    )  # temperatures
    replayed = table.split("machine, replayed")[1].split("\n\n")[0].splitlines()[2:]
    assert len(replayed) == 3
    assert all(float(line.split("|")[2].split()[0]) > 0.5 and "%" in line.split("|")[3] for line in replayed)
    gains = {line.split("|")[1].strip(): float(line.split("|")[3].replace("*", "").split()[0]) for line in replayed}
    assert gains["flat verification"] > 3


def test_a_trace_without_candidates_is_refused(tmp_path, capsys):
    save_trace(tmp_path / "trace-0.npz", made_up_trace()._replace(candidate=None))
    assert entropy.main(["siblings", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "does not say which candidate is right" in capsys.readouterr().err
