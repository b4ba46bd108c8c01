"""What compilers for chips that are not here wrote, read and weighed: made-up texts in their formats, no compiler."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from experiments import accelerators
from experiments.lib import chips, engines
from experiments.lib.chips import CHIPS, LLAMA_8B, PAIRS, PROGRAMS, TARGETS, Job, program, shapes_of, weights_read
from experiments.lib.trace_runs import costs_or_default

ROUND = "jit(run_rounds)/while/body"
STEP = f"{ROUND}/draft/while/body"
PARTS = [
    (100, f"{STEP}/draft_pass/Llama/layer_0/attention/dot"),
    (10, f"{STEP}/draft_distribution/by_platform/cond/branch_0_fun/reduce_sum"),
    (20, f"{STEP}/draft_distribution/cond/branch_0_fun/exp"),
    (40, f"{STEP}/draft_distribution/cond/branch_1_fun/exp"),
    (80, f"{STEP}/draft_distribution/cond/branch_1_fun/cond/branch_1_fun/while/body/add"),
    (160, f"{STEP}/draft_distribution/cond/branch_1_fun/cond/branch_0_fun/add"),
    (1000, f"{ROUND}/verify/cond/branch_1_fun/target_pass/Llama/layer_3/mlp/dot"),
    (2000, f"{ROUND}/verify/cond/branch_1_fun/cond/branch_1_fun/exp"),
    (3, f"{ROUND}/draft/add"),
    (5, f"{ROUND}/commit/while"),
]
PROGRAM = "".join(
    f'  %f.{number} = f32[8]{{0}} fusion(%a), metadata={{op_name="{name}" stack_frame_id=1}}, '
    f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'
    for number, (cycles, name) in enumerate(PARTS, 1)
)
PROGRAM += "  %copy.1 = f32[8]{0} copy(%a)\n  %w = (s32[]) while(%t), condition=%c, body=%b"
PROGRAM += """
  %all-reduce.3 = f32[4,2,24]{2,1,0} all-reduce(%x), channel_id=1
  %ar = (f32[8], f32[8]) all-reduce-start(%y), channel_id=2
  %ard = f32[8] all-reduce-done(%ar)
  %all-gather = f32[4,2,64]{2,1,0} all-gather(%all-reduce.3), metadata={op_name="all-reduce("}
"""


def test_operations_belong_to_parts_of_a_round_and_to_the_paths_they_run_on(tmp_path):
    facts = chips.facts_of("tpu", PROGRAM, tmp_path, (2, 4))
    parts = facts["parts"]
    step = {"all": {"ops": 6, "cycles": 410}, "greedy": {"ops": 3, "cycles": 130}}
    assert parts["draft step"] == step | {"sampled": {"ops": 4, "cycles": 310}}  # no top-k, the second of two branches
    assert [parts["verify 4 tokens"][path]["cycles"] for path in ("sampled", "greedy")] == [3000, 1000]
    assert parts["draft"]["all"] == {"ops": 1, "cycles": 3} and parts["commit"]["all"]["cycles"] == 5
    assert chips.facts_of("tpu", PROGRAM, tmp_path, (4,))["parts"]["verify"]["all"]["ops"] == 2, "no branch of widths"
    assert facts["instructions"] == {"while": 1, "conditional": 0, "copy": 1, "fusion": 10}
    assert facts["collectives"] == {"all-gather": 1, "all-reduce": 2}, "each once"


THUNKS = """001: kCopy  [source] kCopy
002: kWhile [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source]
        004: kCopy         [source] kCopy
        005: kCustomKernel [source] loop_add_fusion grid: [1, 1, 1]
        006: kWhile        [source]
            007: kGemm [source] dot.1
    008: kConditional [source]
        009: kCustomKernel [source] loop_exp grid: [1, 1, 1]
"""


def dumped(folder, sequence):
    """What facts_of makes of a GPU's dump with these thunks."""
    (folder / "m.thunk_sequence_after_thunk_passes.txt").write_text(sequence)
    names = {"add.1": f"{STEP}/add", "dot.1": f"{STEP}/draft_pass/dot"}
    names["exp.1"] = f"{ROUND}/verify/cond/branch_0_fun/exp"
    lines = [f'  %{name} = f32[8] fusion(%a), metadata={{op_name="{scope}"}}' for name, scope in names.items()]
    (folder / "m.sm_90_gpu_after_optimizations.txt").write_text("\n".join(lines))
    thunks = zip(names, (5, 7, 9), strict=True)
    pairs = [f'profile_annotation: "{name}"\n thunk_id: {number}' for name, number in thunks]
    (folder / "m.thunk_metadata.txt").write_text("\n".join(pairs))
    return chips.facts_of("cuda", "", folder, (2, 4))


def test_thunks_outside_of_command_buffers_wait_for_the_host(tmp_path):
    with pytest.raises(ValueError, match="no thunk sequence"):
        chips.facts_of("cuda", "", tmp_path, (2, 4))
    facts = dumped(tmp_path, THUNKS)
    assert facts["thunks"] == {"copies": 2, "whiles": 1, "conditionals": 1, "kernels": 4, "command_buffers": 1}
    ops = {name: paths["all"]["ops"] for name, paths in facts["parts"].items()}
    assert ops == {"draft step": 2, "verify 2 tokens": 1, "other": 1}
    captured = "000: kCommandBuffer\n" + "".join(f"    {line}\n" for line in THUNKS.splitlines())
    counts = dumped(tmp_path, captured)["thunks"]
    assert counts["kernels"] == 4 and not {"whiles", "conditionals"} & counts.keys()


def part(cycles):
    return {path: {"ops": 10, "cycles": cycles} for path in chips.PATHS}


def row(chip="tpu-v5e", **more):
    parts = {f"verify {n} tokens": part(cycles) for n, cycles in ((2, 600_000), (4, 750_000), (8, 1))}
    known = {"chip": chip, "pair": "smollm2", "program": "run", "batch": 1, "error": None, "seconds": 1.0}
    sizes = {"argument": 3e8, "alias": 200, "caches": 200, "temp": 10**6, "output": 1}
    weights = {"weights_read": {"target": 269e6, "drafter": 8e6}, "parts": parts | {"draft step": part(150_000)}}
    return known | sizes | weights | {"instructions": {"copy": 3}} | more


def test_a_cost_model_is_the_longer_of_cycles_and_reading_the_weights():
    model = accelerators.estimated_costs(row(), 7)
    assert model.drafter_step == pytest.approx(150_000 / 1.5e9) and model.widths == (2, 4, 8)
    least = 269e6 / 819e9  # the last width's one cycle is less than reading the target's weights; passes never fall
    np.testing.assert_allclose(model.target_pass, [max(600_000 / 1.5e9, least), 750_000 / 1.5e9, 750_000 / 1.5e9])
    assert "the compiler's estimate" in model.device
    slow = row(parts=row()["parts"] | {"draft step": part(10)})
    assert accelerators.estimated_costs(slow, 7).drafter_step == pytest.approx(8e6 / 819e9)
    assert [accelerators.estimated_costs(other, 7) for other in (row("h100"), row(error="no"))] == [None, None]


def test_the_report_is_the_stored_one(stored):
    thunks = {"whiles": 11, "conditionals": 13, "command_buffers": 1, "copies": 4}
    rows = [row(), row("h100", thunks=thunks, collectives={"all-reduce": 3}), row("b200", error="no memory")]
    rows.insert(2, row("h100", program="prefill", alias=0, thunks={"command_buffers": 2}))
    stored("accelerators.md", accelerators.report(rows, 7), units=1.5)


def test_estimated_costs_go_by_their_name_and_say_what_they_are():
    for chip in (chip for chip in CHIPS.values() if chip.platform == "tpu"):
        model = costs_or_default(chip.name)
        assert "the compiler's estimate" in model.device and chip.name in model.device and 0 < model.ratio < 1
    with pytest.raises(FileNotFoundError, match="no cost model 'tpu-v9'"):
        costs_or_default("tpu-v9")


def test_budgets_name_what_exceeds_them_and_the_committed_ones_say_why():
    budget = {"copies": {"most": 3, "why": "as today"}, "host round trips": {"most": 0, "why": "one graph"}}
    assert accelerators.over_budget(row(), budget) == []
    over = accelerators.over_budget(row(thunks={"whiles": 1, "copies": 4}), budget)
    assert over == ["tpu-v5e: 4 copies, 3 allowed (as today)", "tpu-v5e: 1 host round trips, 0 allowed (one graph)"]
    assert accelerators.over_budget(row(alias=100), budget) == ["tpu-v5e: not every cache is donated"]
    assert "does not compile" in accelerators.over_budget(row(error="x"), budget)[0]
    budgets = json.loads(accelerators.BUDGETS.read_text())
    assert budgets.keys() == set(accelerators.SMALL["chips"])
    for limits in budgets.values():
        accelerators.over_budget(row(), limits)  # raises for a quantity that is not measured
        assert all(len(limit["why"]) > 10 for limit in limits.values())


READING = [("smollm2-reading", name) for name in ("prefill", "run")]


@pytest.mark.parametrize(("pair", "name"), [*(("tiny", name) for name in PROGRAMS), *READING])
def test_every_program_traces_by_shapes(pair, name):
    function, arguments = program(name, shapes_of(PAIRS[pair], 2, 128, 3))
    assert function.trace(*arguments).jaxpr.jaxpr.eqns


def test_the_weights_that_a_pass_reads():
    tiny = PAIRS["tiny"]
    sizes, whole = weights_read(tiny), weights_read(tiny._replace(draft_vocabulary=None))
    assert whole["drafter"] - sizes["drafter"] == (49152 - 8192) * 224 * 2
    per_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    large = tiny._replace(target=dataclasses.replace(LLAMA_8B, num_hidden_layers=2))
    assert weights_read(large)["target"] == 2 * (2 * per_layer + 4096 + LLAMA_8B.vocab_size * 4096)


def test_gpus_have_target_files_and_flags_only_where_they_belong():
    for chip in CHIPS.values():
        assert (TARGETS / f"{chip.name}.txtpb").exists() == (chip.platform == "cuda")
        assert Path(accelerators.__file__).parents[1].joinpath(chip.packages).exists()
    job = Job("h100", "tiny", "run", "out")
    assert "--xla_gpu_autotune_level=0" in chips.environment(job)["XLA_FLAGS"]
    assert "XLA_FLAGS" not in chips.environment(Job("tpu-v5e", "a", "b", "c"))
    assert chips.environment(job)["SPECDEC_JAX_KERNELS"] == "off"  # else branches of a CPU's kernels hide products


def test_an_environment_that_cannot_be_made_is_a_line(tmp_path, monkeypatch, capsys):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ERROR: no matching distribution' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(engines.Failed, match="requirements-tpu.txt does not install: ERROR: no matching"):
        engines.python_of("requirements-tpu.txt", tmp_path, seconds=5, base=str(broken))
    broken.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(engines.Failed, match="does not install: not within 0 s"):
        engines.python_of("requirements-tpu.txt", tmp_path, seconds=0.2, base=str(broken))

    def fail(*_, **__):
        raise engines.Failed("requirements-tpu.txt does not install")

    monkeypatch.setattr(accelerators, "python_of", fail)
    options = ["--chips", "tpu-v5e", "--programs", "run", "--environments", str(tmp_path)]
    assert accelerators.main([*options, "--out", str(tmp_path / "run")]) == 0
    assert "skipped: requirements-tpu.txt" in " ".join(capsys.readouterr().out.split())
