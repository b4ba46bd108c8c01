"""Pages are run as a reader would, on tiny models; the reference lists what is public, the workflow what exists."""

import ast
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
from pages import ROOT, blocks, documented_columns
from tiny_weights import write_tokenizer

import specdec_jax
from experiments.lib.run_folder import read_rows
from specdec_jax import models
from specdec_jax.app import cli
from specdec_jax.lossless import Drawing, Shape, prove_rounds, toy_decoder
from specdec_jax.lossless import test_by_sampling as tested_by_sampling
from specdec_jax.models import adapters
from specdec_jax.stopping import static
from specdec_jax.text.strategies import TYPES, choose, find_factory, names
from specdec_jax.verification import rejection
from tools import notebooks

PYTHON = blocks("extending.md", "python")
FILES = {match[1]: text for text in PYTHON if (match := re.match(r"# file: (\S+)\n", text))}
SNIPPETS = [text for text in PYTHON if not text.startswith("# file: ")]
COMMANDS = re.findall(r"^\$ (.*)$", "".join(blocks("extending.md", "console")), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, importable, as the current folder."""
    folder = tmp_path_factory.mktemp("docs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "configs").symlink_to(ROOT / "configs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "__path__", [*models.__path__, str(folder / "specdec_jax" / "models")])
        patched.syspath_prepend(folder)
        patched.chdir(folder)
        yield folder
    for name in ("survival_floor", "damped", "longest_drafts", "specdec_jax.models.olmo"):
        sys.modules.pop(name, None)


def test_the_page_has_what_this_test_runs():
    assert (len(FILES), len(SNIPPETS), len(COMMANDS)) == (7, 3, 11)


SHAPE = Shape(vocab_size=6, longest=2, batch=3, reads=False, chosen=False)


def test_the_snippets_run_in_order(folder):
    namespace = {}
    for text in SNIPPETS:
        exec(compile(text, "docs/extending.md", "exec"), namespace)


def test_the_verifier_is_lossless_and_its_number_matters(folder):
    from damped import damped

    from specdec_jax.stopping import adaedl

    for keep in (0.0, 0.6, 1.0):
        result, rows, coverage = prove_rounds(adaedl(), damped(keep=keep), Drawing(0), SHAPE, rounds=2)
        assert result.measure < 2e-6 and not rows.wrong and coverage.lengths.min() > 0


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("name", ["follows", "recent"])
def test_the_drafters_draft_and_are_lossless(folder, name):
    vocab, most = 6, 3
    drafter = choose("drafter", f"{name}.py", max_draft_length=most, vocab_size=vocab)
    decoder, params = toy_decoder(static(draft_length=most), rejection(), most, drafter=drafter, vocab_size=vocab)
    report = tested_by_sampling(decoder, params, (0, 1, 0), tokens=4, sequences=16_384)
    assert report.lossless and report.drafted[-1] > 100


@pytest.mark.seldom
@pytest.mark.optimised
def test_the_first_proof_on_the_command_line_succeeds(folder, capsys):
    line = next(line for line in COMMANDS if "verify-lossless" in line)
    assert cli.main([*shlex.split(line)[3:], "--max-draft-length", "3", "--seed", "0"]) == 0
    assert "No deviation in" in capsys.readouterr().out


@pytest.mark.parametrize("line", [line for line in COMMANDS if "specdec_jax" in line])
def test_every_command_parses_and_names_rules_and_hyperparameters_that_exist(folder, line):
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "specdec_jax"]
    rules = cli._parsed(words[3:]).rules
    policy = choose("policy", rules.policy)
    verifier = choose("verifier", rules.verifier)
    after = words[words.index("--drafter") + 1] if "--drafter" in words else ""
    drafters = {re.sub(r"\(.*", "", name) for name in after.split(",")}
    assert {policy.name, verifier.name, *drafters} & {"survival_floor.py", "damped.py", "follows.py", "recent.py"}


def test_the_config_loads(folder):
    config = runpy.run_path("compare_floors.py")["config"]
    names = [method.name for method in config.chosen_methods()]
    assert names == ["plain", "static-3", "adaedl", "floor-0.1", "floor-0.3", "floor-0.5"]
    assert len({method.policy.bare for method in config.methods[3:]}) == 1  # one compiled program
    assert "python -m experiments.compare compare_floors.py --limit 2 --max-new-tokens 16" in COMMANDS


def test_the_family_loads_from_a_hugging_face_folder(folder, tmp_path):
    from specdec_jax.loading import load_model, save_hf_folder
    from specdec_jax.loading.tokenizer import tokenizer_from_folder
    from specdec_jax.models import olmo

    write_tokenizer(tmp_path)
    config = olmo.OlmoConfig(272, 24, 40, 2, 4, 2, 6, max_position_embeddings=64, eos_token_ids=(2,))
    params = olmo.init_params(config, jax.random.key(1), "float32")
    save_hf_folder(tmp_path / "olmo", config, params, tokenizer_from_folder(tmp_path))
    loaded = load_model(tmp_path / "olmo", dtype="float32")
    assert loaded.config == config and loaded.model.spec.eos_ids == (2,)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), loaded.params, params))
    with pytest.raises(ValueError, match="serves no clip_qkv, got 8.0"):
        olmo.OlmoConfig.from_hf({**config.to_hf(), "clip_qkv": 8.0})


def test_the_trace_study_answers_and_goes_on(folder, tmp_path, capsys):
    import longest_drafts

    from experiments.lib.run_folder import read_rows
    from experiments.lib.smoke import made_up_trace

    line = shlex.split(next(line for line in COMMANDS if "longest_drafts" in line))
    command = [*line[3:], "--limits", "2", "16", "--out", str(tmp_path / "out")]
    assert longest_drafts.main(command) == 0
    rows = [row for row in read_rows(tmp_path / "out") if row["task"] == "all" and row["temperature"] == 1.0]
    rounds = {row["what"]: sum(row["rounds"]) for row in rows}
    assert list(rounds) == [f"{name}, {limit}" for name in longest_drafts.RULES for limit in (2, 16)]
    # a round of at most two drafts emits at most three tokens
    tokens = made_up_trace(1.0).num_positions
    assert rounds["static-16, 2"] >= tokens / 3 and rounds["static-16, 16"] < rounds["static-16, 2"]
    written = (tmp_path / "out" / "results.jsonl").read_bytes()
    assert longest_drafts.main(command) == 0 and (tmp_path / "out" / "results.jsonl").read_bytes() == written
    assert (tmp_path / "out" / "limits.png").exists()
    assert longest_drafts.main(["--smoke", "--limits", "40", "--out", str(tmp_path / "no")]) == 2
    assert "limits must lie in [1, 16], got (40,)" in capsys.readouterr().err


NAMED = re.compile(r"experiments\.([a-z]\w*)")
STUDIES = {"distill": "judge|rank_tokens", "tables": "build|prior", "policies": "headroom"}


def test_every_command_that_documents_name_exists():
    """And every study of docs/reproduce.md, "One question, one command"."""
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.py")]
    for page in pages:
        for name in set(NAMED.findall(page.read_text(encoding="utf-8"))):
            parts = [ROOT / "experiments" / f"{name}.py", ROOT / "experiments" / name]
            assert any(part.exists() for part in parts), f"{page.name} names experiments.{name}"
    table = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8").split("## One question, one command")[1]
    named = re.findall(r"^\| [^|]+ \| `(\w+) ?(\w*)", table.split("\n## ")[0], re.MULTILINE)
    commands = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert len(commands) <= 15
    assert {name for name, _ in named} == commands
    for name, study in named:
        assert not study or study in STUDIES[name].split("|"), f"{name} {study}"


README = blocks("../README.md", "python")


def test_the_five_lines_of_the_readme(tiny_folders, capsys):
    """On a tiny pair: what is tested is that the calls are there and fit together."""
    assert len(README[0].split("\n\n")[1].splitlines()) == 4 and "pair = sd.measure_costs(sd.build_pair())" in README[0]
    tiny = README[0].replace("sd.build_pair()", "sd.build_pair({!r}, {!r})".format(*tiny_folders))
    tiny = tiny.replace("sd.measure_costs(", "(sd.measure_costs and ")  # measuring is tested elsewhere
    tiny = tiny.replace("max_new_tokens=64", "max_new_tokens=8").replace("pair=pair", "pair=pair, chat=False")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a reader has them
        exec(compile(tiny, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_own_rule(tmp_path):
    path = tmp_path / "confident.py"
    path.write_text(README[1], encoding="utf-8")
    result, rows, coverage = prove_rounds(choose("policy", f"{path}(floor=0.5)"), rejection(), Drawing(0), SHAPE)
    assert result.measure < 2e-6 and not rows.wrong and coverage.lengths.min() > 0


LIBRARY = blocks("library.md", "python")
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
FLAGS += " --xla_llvm_disable_expensive_passes=true"  # programs that are compiled soon rather than run fast
CHECKS = """
assert decoder.num_programs("run") == programs, "refreshed parameters compiled"
assert sd.summarise(state.statistics)["num_draft_tokens"] > 0
assert scores.log_p.shape == scores.log_q.shape == (4, 12)
"""


def test_the_page_of_your_model_runs():
    """Its models pass `check_model`, and what they decode is compared with their own passes, on the page itself."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a reader has them
        exec(compile("\n".join(blocks("your_model.md", "python")), "your_model.md", "exec"), seen := {})
    assert seen["report"] < 1e-4


def test_notebooks_have_the_cells_of_their_pages():
    """`python tools/notebooks.py` makes them again; a changed page whose notebook was not made again fails."""
    for name, wanted in notebooks.sources().items():
        book = json.loads((ROOT / "docs" / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))
        found = ["".join(cell["source"]) for cell in book["cells"][:-1]]
        assert found == [source for source in wanted if source], name
        code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], f"{name} was not run"


@pytest.mark.seldom
def test_the_page_of_the_library_runs():
    assert len(LIBRARY) == 9
    code = "\n".join(["from specdec_jax.compilation_cache import enable; enable()", *LIBRARY, CHECKS])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3


@pytest.fixture
def tiny_models(tiny_folders, tmp_path, monkeypatch):
    prompts = tmp_path / "configs" / "prompts" / "demo.jsonl"  # short ones: the tiny target reads 128 tokens
    prompts.parent.mkdir(parents=True)
    texts = ["hello", "why?", "the end", "one two"]
    lines = [{"id": text, "category": text[0], "text": text} for text in texts]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tiny_folders


def test_the_first_generation(tiny_models, capsys):
    code = "\n".join(blocks("first_generation.md", "python"))
    assert code.count('"smollm2", "smollm2-drafter"') == 1
    code = code.replace(
        '"smollm2", "smollm2-drafter"',
        f'{tiny_models[0]!r}, {tiny_models[1]!r}, dtype="float32", policy=sd.stopping.static(draft_length=3)',
    )
    exec(compile(code, "first_generation.md", "exec"), seen := {})
    assert re.search(r"\d\.\d\d times plain decoding", capsys.readouterr().out)
    assert seen["seen"]["num_draft_tokens"] > seen["seen"]["num_accepted_tokens"] > 0, "else the page shows nothing"
    shares = {"num_drafts", "num_draft_tokens"}  # follow from others
    text = (ROOT / "docs" / "first_generation.md").read_text(encoding="utf-8")
    assert [name for name in {*seen["seen"]} - shares if name not in text] == []


def test_every_rule_on_one_recording(tiny_models, capsys):
    commands = [shlex.split(line[2:]) for line in blocks("every_rule.md", "console")[0].splitlines()]
    short = ["--target", tiny_models[0], "--drafter", tiny_models[1], "--max-new-tokens", "24", "--no-chat"]
    for command, more in zip(commands, [[*short, "--dtype", "float32"], []], strict=True):
        assert command[:2] == ["python", "-m"]
        assert import_module(command[2]).main([*command[3:], *more]) == 0
    exec(compile("\n".join(blocks("every_rule.md", "python")), "every_rule.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"lambda 0\.\d\d: \d\.\d\d times plain decoding, \d\.\d\d tokens a pass", out)
    assert "adaedl-keep" in out and "0.7" in out, "the table by rule and temperature"
    columns = documented_columns("Replays (`policies`")
    assert all(columns == {*row} for row in read_rows("runs/demo-rules"))


@pytest.mark.seldom
def test_sampling_in_a_training_loop(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks("training.md", "python"))
    assert code.count("STEPS = 32, 24, 64, 300") == 1
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies Python numbers
        exec(compile(code.replace("64, 300", "8, 3"), "training.md", "exec"), seen := {})
    assert len(seen["curves"]) == 2 and capsys.readouterr().out.count("of drafts accepted at the end") == 2
    assert seen["step"]._cache_size() == 3, "refreshed parameters compiled"
    assert (tmp_path / "drift.png").stat().st_size > 10_000


LISTED = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)

PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.stem != "reference")]
TEXTS = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)


def offered(package: str) -> set[str]:
    """What a package's __init__ imports from its files."""
    tree = ast.parse((ROOT / "specdec_jax" / package / "__init__.py").read_text(encoding="utf-8"))
    return {str(alias.asname) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_the_reference_lists_every_public_name_once():
    folders = {"stopping", "verification", "drafters"}
    public = {f"specdec_jax.{name}" for name in {*specdec_jax.__all__} - folders - {"__version__"}}
    strategies = {f"{find_factory(kind, name).__module__}.{name}" for kind in TYPES for name in names(kind)}
    parts = {
        f"specdec_jax.{folder}.{name}"
        for folder in folders
        for name in offered(folder)
        if f"specdec_jax.{folder}.{name}.{name}" not in strategies
    }
    public |= strategies | parts | {f"specdec_jax.types.{name}" for name in offered("types")}
    functions = [each for each in vars(adapters).values() if inspect.isfunction(each)]
    made = [each.__name__ for each in functions if "LanguageModel" in str(inspect.signature(each).return_annotation)]
    public |= {f"specdec_jax.models.adapters.{name}" for name in made}
    others = {*LISTED} - public
    assert public < {*LISTED} and len({*LISTED}) == len(LISTED) and "specdec_jax.models.adapters.per_row" in public
    assert [name for name in others if not re.search(rf"\b{name.split('.')[-1]}\b", TEXTS)] == []


def value_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(__import__(module, fromlist=[attribute]), attribute)


def test_what_the_pages_import_is_in_the_reference():
    """By value: a strategy is listed by its file, and pages import it from its package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXTS, re.MULTILINE | re.DOTALL)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    used = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    used = {name for name in used if name.startswith("specdec_jax.")}
    listed = {id(value_of(name)) for name in LISTED}
    missing = {name for name in used - {"specdec_jax.models.olmo"} if id(value_of(name)) not in listed}
    assert {name for name in missing if getattr(value_of(name), "__module__", "") not in LISTED} == set() != used


def test_every_page_has_one_place_in_the_site_and_the_evidence_is_short():
    placed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    roots = {"index.md", "contributing.md", "changelog.md"}  # README and the others, by tools/docs_pages.py
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert sorted(name for name in placed if name not in roots) == pages
    evidence = {"README", "method", "results", "audit", "replay", "losslessness", "reproduce", "limits"}
    every = "\n".join(path.read_text(encoding="utf-8") for path in PAGES if path.stem in evidence)
    written = re.sub(r"```.*?```|<!-- table: ([\w-]+) -->.*?<!-- end: \1 -->", "", every, flags=re.DOTALL)
    assert sum(bool(re.search(r"\w", word)) for word in written.split()) <= 9_000
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 120


def test_the_workflow_and_the_script_have_the_same_parts():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    listed = re.search(r"part: \[(.*)\]", workflow)
    default = re.search(r"\$\{@:-(.*)\}", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert listed and default and listed[1].replace(",", "") == default[1]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = [*default[1].split(), *re.findall(r"(?:part:|run: \.ci/run) ([\w-]+)", workflow)]
    assert {*used} <= {*targets}
