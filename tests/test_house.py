"""The house's rules: imports point downwards, no machine's paths, one version, a Python that works."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import specdec_jax
from specdec_jax.types import (
    Draft,
    Drafter,
    DraftModel,
    Hidden,
    LanguageModel,
    Monitor,
    Next,
    Observer,
    RoundContext,
    Seen,
    Source,
    StoppingPolicy,
    VerificationResult,
    Verifier,
)
from tools import mutations

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "specdec_jax"
DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["specdec_jax"]

# What each file or folder of specdec_jax may import of it, besides itself; a file of a folder that has an entry of its
# own goes by that alone. Strategies never import one another, and decoding receives them. Above the core the order of
# the list is the rule: anything may import what stands before it.
BASE = {"types", "strategy", "hyperparameters", "ranges"}
READS = {*BASE, "decoding.sampling", "decoding.phase"}
CORE = {
    "ranges": set(),
    "hyperparameters": {"ranges"},
    "strategy": {"ranges", "hyperparameters"},
    "types": {"strategy"},
    "compilation_cache": set(),
    "sharding": set(),
    "meshes": {"sharding"},
    "locks": set(),
    "processes": {"locks"},
    "decoding.sampling": BASE,
    "decoding.phase": {"types"},
    "decoding.statistics": {"types", "hyperparameters"},
    "decoding.draft_loop": {"types", "hyperparameters"},
    "decoding.cache_feed": {"types"},
    "decoding.teacher_forcing": {"types", "decoding.cache_feed"},
    "stopping": READS,
    "verification": {*READS, "verification.rejection"},
    "verification.rejection": {*READS, "verification"},  # the default of `build_decoder`
    "monitors": READS,
    "drafters": {*READS, "decoding.cache_feed", "decoding.teacher_forcing"},
    "kernels": {"compilation_cache"},
    "models": {"types", "sharding", "kernels"},
    "drafters.draft_models": {"types", "models"},
    "loading": {"strategy", "types", "models", "meshes", "sharding", "drafters.draft_models"},
    "decoding.rounds": {
        *("types", "hyperparameters", "decoding.sampling", "decoding.phase", "decoding.statistics"),
        "decoding.draft_loop",
    },
    "decoding.prefill": {"types", "sharding", "decoding.cache_feed"},
    "decoding": {  # the rest of the folder: a request becomes a state, and parts become a program
        *READS,
        *("sharding", "verification.rejection"),
        *("decoding.statistics", "decoding.draft_loop", "decoding.cache_feed", "decoding.rounds", "decoding.prefill"),
        "decoding.teacher_forcing",
    },
}
ABOVE = ["lossless", "costs", "text", "replay", "metrics", "app", "__main__"]  # the layers above the core, in order
SIDE = {"distillation", "contrib"}  # stand on everything below app, and no layer imports them
CHAT = {"app.chat": "app.cli"}  # a folder of app, and the only file outside it that may import it
EXTERNAL = {"types": {"jax", "typing", "collections", "dataclasses"}}  # types has no logic, so nothing to import


def allowed(name: str) -> set[str]:
    if name in CORE:
        return CORE[name]
    below = {*CORE, *ABOVE[: ABOVE.index("app" if name in SIDE else name)]}
    return below - {"drafters"} if name == "costs" else below  # costs receive the drafter that they measure


def imports_of(source: str, package: str) -> list[str]:
    """Every module that the source imports, anywhere in it, as an absolute dotted name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def place_of(parts: tuple[str, ...] | list[str]) -> str:
    """The entry of the order that a dotted name below specdec_jax goes by: its file's, or its folder's."""
    return own if (own := ".".join(parts[:2])) in CORE else parts[0]


def broken_arrows(relative: Path, source: str) -> list[str]:
    """What a file of specdec_jax imports and must not."""
    name = place_of(relative.with_suffix("").parts)
    package = ".".join(["specdec_jax", *relative.parts[:-1]])
    wrong = []
    for module in imports_of(source, package):
        top, *rest = module.split(".")
        outside = ".".join(rest[:2]) in CHAT and ".".join(relative.parts[:2]) not in CHAT
        if outside and ".".join(relative.with_suffix("").parts) != CHAT[".".join(rest[:2])]:
            wrong.append(module)
        elif top == "specdec_jax":  # a name of the package itself, such as generate, is an import of all it stands on
            wrong += [module] if rest and place_of(rest) not in {*allowed(name), name, "__version__"} else []
        elif top in ("configs", "experiments", "tests") or top not in EXTERNAL.get(name, {top}):
            wrong.append(module)
    return wrong


SOURCES = sorted(
    path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "__init__.py"
)


@pytest.mark.parametrize("relative", SOURCES, ids=str)
def test_imports_point_downwards(relative):
    name = place_of(relative.with_suffix("").parts)
    assert name in {*CORE, *ABOVE, *SIDE}, f"{name} has no place in the order of imports yet; give it one in this test"
    assert broken_arrows(relative, (PACKAGE / relative).read_text(encoding="utf-8")) == []


CASES = (ROOT / "tests" / "data" / "imports.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("verdict", "file", "line"), [case.split(" ", 2) for case in CASES])
def test_a_wrong_import_is_seen_and_a_right_one_is_not_held_against_a_file(verdict, file, line):
    assert len(broken_arrows(Path(file), line.replace("\\n", "\n"))) == (verdict == "wrong")


def test_drafters_do_not_bring_in_the_decoder():
    """They import a file of its folder, and a folder's `__init__` is run before its files."""
    modules = "[name for name in sys.modules if name.startswith('specdec_jax')]"
    code = f"import sys, specdec_jax.drafters; print(*{modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "specdec_jax.decoding.cache_feed" in found
    assert not {f"specdec_jax.decoding.{name}" for name in ("decoder", "rounds", "state")} & set(found)


def committed_files() -> list[Path]:
    """What git tracks or would track; everything in a copy without git."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [ROOT / name for name in listed if (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        hidden = (".venv", "runs", "build", "dist")
        return [path for path in ROOT.rglob("*") if path.is_file() and path.relative_to(ROOT).parts[0] not in hidden]


# Written so that this line does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.}/])/(?:work|root|home|Users)/\w|[-]-find-links|index[-]url|pythonhosted[.]org")


def test_no_file_names_a_machine_or_a_registry_and_no_figure_is_still_to_be_filled_in():
    assert all(map(MACHINE_PATH.search, ("open('/" + "root/x')", "see /" + "home/me", "pip --" + "find-links .")))
    assert not MACHINE_PATH.search("https://example.org/home/page and a/work/b")
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.py")]
    found = [f"{path.name}: {match[0]}" for path in texts for match in re.finditer(r"@[A-Z]+@", path.read_text())]
    for path in committed_files():
        if path.suffix in (".safetensors", ".gguf", ".png", ".npy") or path.name == "tokenizer.json":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert found == []


def lines_of(*patterns: str) -> int:
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


CENTRAL = [  # what a reader of a round of AdaEDL with a model drafter opens
    *("decoding/draft_loop.py", "decoding/rounds.py", "decoding/decoder.py", "types/seams.py", "types/values.py"),
    *("drafters/model.py", "stopping/adaedl.py", "stopping/_thresholded.py", "stopping/_algorithm_1.py"),
    "verification/rejection.py",
]
PATH = (
    "decoding/decoder.py",
    "drafters/model.py",
    "stopping/adaedl.py",
    "verification/rejection.py",
    "types/__init__.py",
)
BUDGETS = {  # lines now, as a ceiling, and the aim; a ceiling only falls
    "the package without contrib and distillation": (22_897, 23_000),
    "contrib": (4_048, 4_200),
    "distillation": (2_270, 2_300),
    "experiments": (6_973, 7_000),
    "tests": (21_467, 21_500),
    "ten central files": (1_522, 1_700),
    "plain AdaEDL, with all it imports": (3_066, 3_100),
}


def closure(*names: str) -> set[Path]:
    """These files of the package, and all of its files that they import."""
    seen: set[Path] = set()
    todo = [PACKAGE / name for name in names]
    while todo:
        if (path := todo.pop()) not in seen:
            seen.add(path)
            package = ".".join(["specdec_jax", *path.relative_to(PACKAGE).parts[:-1]])
            modules = [module.split(".")[1:] for module in imports_of(path.read_text(encoding="utf-8"), package)]
            files = [PACKAGE.joinpath(*parts[:end]).with_suffix(".py") for parts in modules for end in (1, 2, 3)]
            todo += [file for file in files if file.is_file()]
    return seen


def test_lines_stay_within_their_budgets():
    counts = {
        "contrib": lines_of("specdec_jax/contrib/**/*.py"),
        "distillation": lines_of("specdec_jax/distillation/**/*.py"),
        "experiments": lines_of("experiments/**/*.py"),
        "tests": lines_of("tests/**/*.py"),
        "ten central files": lines_of(*(f"specdec_jax/{name}" for name in CENTRAL)),
        "plain AdaEDL, with all it imports": lines_of(*(str(path.relative_to(ROOT)) for path in closure(*PATH))),
    }
    whole = lines_of("specdec_jax/**/*.py") - counts["contrib"] - counts["distillation"]
    counts["the package without contrib and distillation"] = whole
    for name, (ceiling, aim) in BUDGETS.items():
        print(f"{name}: {counts[name]:,} lines, at most {ceiling:,}, aim {aim:,}")
    assert {name: count for name, count in counts.items() if count > BUDGETS[name][0]} == {}


# Words that name nothing: the thing has a noun. Public names of earlier versions keep them.
VAGUE = frozenset(["told", "found", "own", "one", "kept", "known", "asked", "beside", "most", "room"])
VAGUE |= {"given", "what", "said", "who", "whose"}
PUBLIC = {
    ("strategy.py", "given"),  # `Strategy.given`, and its field in `Call`
    ("seams.py", "known"),  # `Next.known`
    ("seams.py", "beside"),  # `TreePolicy.beside`, and its function in each rule
    ("comb.py", "beside"),
    ("survival_tree.py", "beside"),
    ("comb.py", "most"),  # options of rules and commands
    ("goodput.py", "most"),
    ("distill.py", "most"),
    ("results.py", "asked"),  # keys of results
    ("intervals.py", "most"),
}


def names_bound(source: str) -> set[str]:
    """Every name that the source gives to a function, a class, a parameter, a variable or an attribute."""
    bound = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            bound.add(node.id if isinstance(node, ast.Name) else node.attr)
    return bound


def test_names_say_what_a_thing_is():
    assert names_bound("def f(own, /):\n    for one in own:\n        self.kept = 1") >= {"own", "one", "kept"}
    vague = []
    for folder in (PACKAGE, ROOT / "experiments", ROOT / "configs", ROOT / "tools"):
        for path in folder.rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            bound = names_bound(path.read_text(encoding="utf-8"))
            bound = {name for name in bound if name.strip("_") in VAGUE and (path.name, name) not in PUBLIC}
            vague += [f"{where}: {name}" for name in bound]
    assert vague == []


def test_every_seeded_bug_has_a_test_in_make_test(request):
    assert [bug.words for bug in mutations.BUGS if mutations.place_of(bug, ROOT) is None] == []
    tests = [item.nodeid for item in request.session.items if not item.get_closest_marker("long")]
    if "not slow" in (option := request.config.option).markexpr or option.keyword or request.config.args != ["tests"]:
        pytest.skip("not all of make test was collected")
    named = [name for bug in mutations.BUGS for name in bug.tests.split()]
    assert [name for name in named if not any(test.startswith(name) for test in tests)] == []


def test_recorded_seconds_are_of_tests_that_exist(request, stale):
    if request.config.args != ["tests"]:
        pytest.skip("not all tests were collected")
    assert stale == []


def test_seams_have_at_most_eight_fields():
    records = Hidden, Source, Next, Draft, VerificationResult, Observer, Seen, RoundContext
    kinds = StoppingPolicy, Verifier, Drafter, Monitor, LanguageModel, DraftModel
    fields = {
        **{kind.__name__: len(kind.__dataclass_fields__) for kind in kinds},  # not what Strategy gives to all
        **{kind.__name__: len(kind._fields) for kind in records},
    }
    assert fields["LanguageModel"] == 5
    assert {name: count for name, count in fields.items() if count > 8} == {}


def test_files_and_functions_stay_short():
    """Files to 500 lines, functions to 60 without their docstrings and the functions they hold."""
    too_long = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "configs").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        sizes = [("file", path.name, len(source.splitlines()), 500)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                inner = sum(len(range(n.lineno, n.end_lineno or 0)) + 1 for n in body if isinstance(n, ast.FunctionDef))
                lines = ((node.end_lineno or 0) - body[0].lineno + 1 if body else 0) - inner
                sizes.append(("function", node.name, lines, 60))
        where = path.relative_to(ROOT)
        too_long += [f"{where}: {kind} {name} has {count}" for kind, name, count, most in sizes if count > most]
    assert too_long == []


CALLED_ONCE = {  # private functions that are called once, by folder, as a ceiling: most belong inside their caller
    **{"app": 8, "contrib": 19, "decoding": 3, "distillation": 14, "lossless": 15, "loading": 4, "models": 2},
    **{"metrics": 2, "replay": 5, "drafters": 2, "kernels": 2, "text": 4},
}


def test_helpers_that_are_called_once_become_fewer():
    counts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        private = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("_")}
        called = Counter(getattr(node.func, "id", "") for node in nodes if isinstance(node, ast.Call))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        counts[path.relative_to(PACKAGE).parts[0]] += sum(called[name] == uses[name] == 1 for name in private)
    for folder, count in sorted(counts.items()):
        print(f"{folder}: {count} private functions that are called once, at most {CALLED_ONCE.get(folder, 0)}")
    assert {folder: count for folder, count in counts.items() if count > CALLED_ONCE.get(folder, 0)} == {}


def test_one_version_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert project["version"] == specdec_jax.__version__ == (citation and citation[1])


def find_python(tmp_path, *arguments, **scripts):
    """Runs tools/find_python.sh where the only Pythons are the given scripts."""
    for name, text in scripts.items():
        script = tmp_path / name.replace("_", ".")
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    environment = {"PATH": f"{tmp_path}", "HOME": f"{tmp_path}", "PYENV_ROOT": f"{tmp_path}/none"}
    command = ["/bin/sh", str(ROOT / "tools" / "find_python.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


WORKS = f'exec "{sys.executable}" "$@"'


def test_the_newest_python_that_works_is_taken(tmp_path):
    broken = 'echo "pyenv: command not found" >&2; exit 127'
    result = find_python(tmp_path, python3_13=broken, python3_12=WORKS, python3_11=broken)
    assert (result.returncode, result.stdout.strip()) == (0, sys.executable)


def test_no_python_that_works_is_one_clear_error(tmp_path):
    result = find_python(tmp_path, python3_13="exit 1", python3="exit 1")
    assert result.returncode == 1 and "No working Python 3.11, 3.12 or 3.13" in result.stderr


def test_a_named_python_that_does_not_work_is_an_error_even_if_others_do(tmp_path):
    result = find_python(tmp_path, "python9", python3_13=WORKS)
    assert result.returncode == 1 and "PYTHON=python9" in result.stderr


def test_an_installed_package_has_every_file_that_is_not_code():
    packed = {path for pattern in DATA for path in PACKAGE.glob(pattern + ("/*" if pattern.endswith("**") else ""))}
    others = {path for path in committed_files() if path.is_relative_to(PACKAGE) and path.suffix not in (".py", ".pyc")}
    assert others and others <= packed, sorted(map(str, others - packed))


def test_a_listing_of_the_package_has_its_public_names_and_each_is_there():
    assert dir(specdec_jax) == sorted(specdec_jax.__all__) and "importlib" not in dir(specdec_jax)
    assert all(getattr(specdec_jax, name) is not None for name in specdec_jax.__all__)
