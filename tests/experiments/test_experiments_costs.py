"""Experiments that weigh rules by costs: each with --smoke, a figure of each by plain loops, going on, and refusals."""

import json

import numpy as np
import pytest
from stopping_oracles import Static
from trace_walks import on_the_other_half, walk

from experiments import adaedl as study
from experiments import entropy, policies, step_cost
from experiments.lib.run_folder import read_rows
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.trace_runs import speedup
from specdec_jax.costs.cost_model import flat, load_cost_model
from specdec_jax.costs.step_cost import Cost
from specdec_jax.replay.trace import save_trace

pytestmark = pytest.mark.slow

LONGEST = 16


@pytest.fixture
def ran(tmp_path):
    """A function that runs an experiment with --smoke: its run folder, and the rows of the second run."""

    def run(module, *arguments):
        out = tmp_path / "out"
        command = [*arguments, "--smoke", "--out", str(out)]
        assert module.main(command) == 0
        first = (out / "results.jsonl").read_bytes() if (out / "results.jsonl").exists() else b""
        assert module.main(command) == 0  # goes on where nothing is left to do
        assert not first or (out / "results.jsonl").read_bytes() == first
        assert (out / "table.md").stat().st_size
        return out, read_rows(out)

    return run


def test_step_cost_writes_a_cost_model_of_the_greedy_step_and_all_widths(ran, monkeypatch):
    out, _ = ran(step_cost)
    costs, model = json.loads((out / "costs.json").read_text()), load_cost_model(out / "cost_model.json")
    medians = {name: entry["median"] for name, entry in costs["passes"].items()}
    assert model.drafter_step == medians["drafter 0"] and model.plain_pass == medians["target float32 1"]
    assert model.widths == (1, 2, 4, 8) and model.batch == 1 and "float32" in model.device
    wanted = np.maximum.accumulate([medians[f"target float32 {width}"] for width in model.widths])
    np.testing.assert_array_equal(model.target_pass, wanted)
    layer = 32 * 16 * (2 + 2 * 2) + 2 * 16 * 32 + 3 * 32 * 48  # q, k, v; output; gate, up and down
    operations = {"prompt": 2 * 64 * 2 * layer + 2 * 2 * 2 * 16 * 64**2, "product": 2 * 64**3}
    assert costs["prompt"]["operations"] == operations
    config = step_cost.StepCost(widths=(1, 16, 17), dtypes=("bfloat16",), batch=3)
    known = {f"target bfloat16 {width}": Cost(width / 10, 0, 0) for width in (1, 16, 17)}
    model = step_cost.costs_of(config, known | {"drafter 0": Cost(0.5, 0, 0)})
    assert model[:4] == (0.5, (1, 16, 17), (0.1, 1.6, 1.7), 0.1) and model.batch == 3
    monkeypatch.setattr(step_cost, "measure_passes", lambda *_: pytest.fail("measured again"))
    assert step_cost.main(["--smoke", "--out", str(out)]) == 0
    assert step_cost.main(["--smoke", "--batch", "0"]) == 2


def test_hardware_predicts_what_plain_loops_count(ran):
    _, rows = ran(policies, "--ratios", "0.01", "0.1", "0.5")
    kinds, ratios = {"flat", "measured"}, ("0.01", "0.1", "0.5")
    assert {row["group"] for row in rows} == {f"{kind}, c = {ratio}" for kind in kinds for ratio in ratios}
    trace = made_up_traces()[0.0]
    known = {(row["group"], row["temperature"], row["what"]): speedup(row) for row in rows}
    estimate, low, high = known["flat, c = 0.1", 0.0, "static"]
    expected = (
        trace.length.sum() / on_the_other_half(trace, range(12), range(17), Static, costs=flat(0.1, LONGEST))[1].sum()
    )
    assert estimate == pytest.approx(expected, rel=1e-9) and low < expected < high
    for (group, temperature, _), value in known.items():
        assert value[0] <= known[group, temperature, "oracle"][0] * 1.0001


def test_drafters_have_their_own_costs(tmp_path):
    for name, boost in (("small", 0.0), ("large", 0.7)):
        (tmp_path / name).mkdir()
        for temperature, trace in made_up_traces(boost=boost).items():
            save_trace(tmp_path / name / f"trace-{temperature:g}.npz", trace)
    groups = [f"small:{tmp_path / 'small'}:0.05", f"large:{tmp_path / 'large'}:0.2"]
    out, trace = tmp_path / "out", made_up_traces(boost=0.7)[1.0]
    assert policies.main(["--groups", *groups, "--rules", "static-7", "--out", str(out)]) == 0
    wanted = ("large", 1.0, "static-7", "all")
    row = next(r for r in read_rows(out) if (r["group"], r["temperature"], r["what"], r["task"]) == wanted)
    base = load_cost_model("configs/costs/cpu.json")
    costs = base._replace(drafter_step=0.2 * base.plain_pass)
    seconds, rounds = np.transpose(
        [walk(trace, text, Static(7), LONGEST, costs)[:2] for text in range(trace.num_texts)]
    )
    assert np.sum(row["emitted"]) == trace.num_positions and np.sum(row["rounds"]) == rounds.sum()
    np.testing.assert_allclose(row["seconds"], seconds)
    overlaps = [trace.overlap[text, at] for text in range(trace.num_texts) for at in range(trace.length[text])]
    assert policies.overlap(trace).estimate == pytest.approx(np.mean(overlaps), rel=1e-5)
    plain = made_up_traces()[0.0]
    greedy = policies.overlap(plain).estimate
    assert greedy == pytest.approx(plain.accepted.sum() / plain.num_positions)
    assert f"| small | 0.050 | {greedy:.3f} ±" in (out / "table.md").read_text()


NO_TRACES = "name traces that python -m experiments.record wrote, or give --smoke"


@pytest.mark.parametrize(
    "command, words, message",
    [
        *((study, name, NO_TRACES) for name in ("lambda", "factor", "tables")),
        *(
            (study, f"{name} no/such/trace.npz", "no trace 'no/such/trace.npz'")
            for name in ("lambda", "factor", "tables")
        ),
        *((command, "", NO_TRACES) for command in (policies, entropy)),
        *((command, "no/such/trace.npz", "no trace 'no/such/trace.npz'") for command in (policies, entropy)),
        (policies, "--smoke --rules adadl", "no rule 'adadl'; did you mean 'adaedl'"),
        (policies, "--smoke --rules a/mine.py b/mine.py", "is called 'mine', as another rule is"),
        (policies, "--smoke --rules adaedl --set threshold=0.1 threshold=0.2", "names a hyperparameter twice"),
        (policies, "--smoke --set threshold=2", "threshold must lie in"),
        (policies, "--smoke --set treshold=0.5", "--set treshold: none of"),
        (policies, "--smoke --set threshold=1:2", "got 'threshold=1:2'"),
        (policies, "--smoke --ratio 0.1 --costs x.json", "--costs or --ratio, not both"),
        (policies, "--smoke --costs x.json", "no cost model 'x.json'"),
        (policies, "--smoke --slope 0.1", "goes with --ratio"),
        (policies, "--smoke --ratios 0", "ratios"),
        (policies, "--smoke --ratios 0.1 --ratio 0.3", "leave out --ratio 0.3"),
        (policies, "one.npz two.npz --ratios 0.1", "traces of one drafter"),
        (policies, "--groups one", "NAME:TRACES:COSTS"),
        (policies, "--groups one:.:-1", "c must lie above 0"),
        (policies, "--groups one:.:none.json", "no cost model"),
        (policies, "--smoke --costs costs.json", "is not a cost model"),
        (study, "tables --smoke --max-draft-length 7", "max_draft_length must be 16 or more"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, command, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text("{}")
    trace = made_up_trace(1.0, texts=2)
    for name in ("one", "two"):
        save_trace(tmp_path / f"{name}.npz", trace._replace(about=trace.about | {"drafter": name}))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(
            "from specdec_jax.stopping import static\n\ndef mine():\n    return static()\n"
        )
    assert command.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said
    assert not list((tmp_path / "runs").glob("*/results.jsonl"))
