"""Configs of experiments: frozen dataclasses, a file loader, and overrides on the command line.

A config is a Python file that sets `config = CompareConfig(...)`. A policy in it is an import, not a string, so a
misspelt one fails at its line and a fork's own policy needs no registration.
"""

import dataclasses
import difflib
import hashlib
import inspect
import json
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from specdec_jax.costs.choices import costs_asked
from specdec_jax.decoding.user_code import definition, location
from specdec_jax.loading.precision import precision
from specdec_jax.ranges import Between, check_fields
from specdec_jax.strategy import Strategy, nearest
from specdec_jax.text.options import Models
from specdec_jax.text.pair import check_drafter
from specdec_jax.text.result_file import files_in
from specdec_jax.text.sampling_params import MinP, NewTokens, SamplingParams, Seed, Temperatures, TopK, TopP
from specdec_jax.text.strategies import import_from_folder_of
from specdec_jax.types import StoppingPolicy, Verifier
from specdec_jax.verification import rejection

T = TypeVar("T")
TAKES = {"CompareConfig": "compare", "DistillConfig": "distill", "EvidenceConfig": "record"}  # experiments


@dataclass(frozen=True)
class Method:
    """One way to decode. Methods whose strategies differ in hyperparameters alone share a program.

    Raises:
        ValueError: something that is no policy or verifier, or words for a drafter that say nothing.
    """

    name: str
    policy: StoppingPolicy | None  # such as adaedl(threshold=0.5); None is plain decoding
    max_draft_length: Annotated[int | None, Between(1)] = None  # None: the config's
    verifier: Verifier = rejection()
    drafter: Any = None  # None: the config's; otherwise all that build_pair takes, such as "prompt_lookup(longest=4)"

    def __post_init__(self) -> None:
        check_fields(self)
        for wanted, value in ((StoppingPolicy, self.policy), (Verifier, self.verifier)):
            if not isinstance(value, wanted) and (value is not None or wanted is Verifier):
                called = f"; call it: {getattr(value, '__name__', '')}()" if callable(value) else ""
                raise ValueError(f"method {self.name!r} needs a {wanted.__name__}, got {value!r}{called}")
        if self.policy is None and self.drafter is not None:
            raise ValueError(f"method {self.name!r} has a drafter and no policy to say when it drafts")
        check_drafter(self.drafter)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Models):
    """Methods side by side on prompts. The first method is the baseline that every speed-up is measured against."""

    name: str
    """Names the run folder."""
    prompts: str
    """A JSONL file (turns, prompt or text per line), FILE:n for every n-th of its prompts, or hub:NAME."""
    methods: tyro.conf.Suppress[tyro.conf.Fixed[tuple[Method, ...]]]
    """Set in the file; --only picks among them."""
    only: tuple[str, ...] = ()
    """Names of methods to run besides the baseline; none: all."""
    against: str | None = None
    """Name of a method that the others are measured against too, in a table of their own."""
    split: str | None = None
    """Only prompts of this split: "calibrate" or "judge" of the files here."""
    limit: Annotated[int | None, Between(1)] = None
    """Only the first prompts."""
    drafter: str = "smollm2-drafter"
    temperatures: Temperatures = (0.0, 0.8)
    """0 is greedy."""
    top_k: TopK = SamplingParams.top_k
    """0 is off."""
    top_p: TopP = SamplingParams.top_p
    """1 is off."""
    min_p: MinP = SamplingParams.min_p
    """0 is off."""
    max_new_tokens: NewTokens = 64
    """Most tokens a prompt."""
    seed: Seed = SamplingParams.seed
    """Seed of the first pass, the same for every method."""
    repeats: Annotated[int, Between(1)] = 1
    """Timed passes per prompt and method, after one that is not timed; each with the next seed."""
    max_draft_length: Annotated[int, Between(1)] = 7
    """Most tokens drafted per round, for methods that set none."""
    verification_widths: tuple[int, ...] | None = None
    """Ascending; none: the steps of the target's measured pass, or powers of two where costs are estimated."""
    rule_costs: bool = False
    """Measure what each rule's own computation takes, which predicted times then contain: half a minute each, once."""
    chat: bool = True
    """Put prompts through the chat template."""
    system: str | None = None
    """System prompt."""
    quality: bool = False
    """Also measure how far each text is from the target's distribution, in a table of its own: for lossy verifiers."""
    out: str | None = None
    """Run folder; none: runs/<name>-<time>."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype != "auto":
            precision(self.dtype)
        costs_asked(self.costs)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"name goes into a folder's name: letters, digits, '_', '-' and '.', got {self.name!r}")
        if not isinstance(self.methods, (tuple, list)) or not all(isinstance(entry, Method) for entry in self.methods):
            raise ValueError(f"methods must be a tuple of Method(...), got {self.methods!r}")
        names = [method.name for method in self.methods]
        if len(set(names)) < len(names):
            raise ValueError(f"method names must differ, got {', '.join(names)}")
        if not self.methods or self.methods[0].policy is not None:
            raise ValueError("the first method is the baseline and must have policy=None")
        for name in (*self.only, *([self.against] if self.against else [])):
            if name not in names:
                raise ValueError(f"no method {name!r} in this config{nearest(name, names)}")

    def chosen_methods(self) -> tuple[Method, ...]:
        """The baseline and those of `only`, in the file's order; all when `only` is empty."""
        wanted = {self.methods[0].name, *self.only}
        return tuple(method for method in self.methods if not self.only or method.name in wanted)


@dataclass(frozen=True)
class PromptKind:
    """Prompts of a kind. If n of the file's N are asked, the i-th is number floor(i N / n)."""

    name: str
    file: str  # a JSONL file in the folder of prompts
    categories: tuple[str, ...]  # only prompts of these categories


@dataclass(frozen=True)
class RecordedPair:
    """A pair of models whose traces are recorded, with what is recorded of it."""

    name: str
    target: str
    drafter: str
    prompts: int  # of each kind
    temperatures: tuple[float, ...]
    seeds: int  # where texts are sampled
    chat: bool = True
    batch: Annotated[int, Between(1)] = 16  # texts that share passes
    drafter_size: str = ""  # its parameters, for tables

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class JudgedRule:
    """A stopping rule with the way its setting is chosen: `default`, the rule's default; `here`, the one that is
    fastest on the other half of the prompts of the pair at that temperature; `elsewhere`, the one that is fastest on
    the other targets at that temperature; `price`, the threshold R (c + (V(8) - V(0)) / 8), with the rate R of the best
    static length on the other half."""

    name: str
    rule: str  # of experiments/lib/rules.py, or a call of a file of specdec_jax/stopping
    choice: Literal["default", "here", "elsewhere", "price"] = "default"


@dataclass(frozen=True)
class Contrast:
    """Two rules that are compared, stated before anything was recorded."""

    name: str
    rule: str  # names of judged rules
    over: str
    expected: Literal["faster", "slower", "level"]
    why: str
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    targets: tuple[str, ...] = ()  # none: all


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    """What is recorded, replayed and contrasted for the archive in results/.

    Raises:
        ValueError: a contrast of rules that are not judged, or names that are not unique.
    """

    name: str
    kinds: tuple[PromptKind, ...]
    pairs: tuple[RecordedPair, ...]  # in the order of recording
    rules: tuple[JudgedRule, ...]
    contrasts: tuple[Contrast, ...]
    max_new_tokens: NewTokens = 128
    long_tokens: NewTokens = 512  # of the prompts that are also answered at length
    long_share: Annotated[int, Between(1)] = 5  # one of so many prompts of each kind
    max_draft_length: Annotated[int, Between(1)] = 15
    data: str = "data"
    """Folder of the prompt files."""
    out: str = "runs/evidence"
    """Where the traces lie; cells that are there are not recorded again."""
    add_to: str = ""
    """An archive, such as results; its cells are not recorded either."""

    def __post_init__(self) -> None:
        check_fields(self)
        for each in (self.kinds, self.pairs, self.rules, self.contrasts):
            names = [entry.name for entry in each]
            if len(set(names)) < len(names):
                raise ValueError(f"names must differ, got {', '.join(names)}")
        judged, targets = [rule.name for rule in self.rules], {pair.target for pair in self.pairs}
        for contrast in self.contrasts:
            for name in (contrast.rule, contrast.over):
                if name not in judged:
                    raise ValueError(
                        f"contrast {contrast.name!r} names no judged rule: {name!r}{nearest(name, judged)}"
                    )
            if unknown := set(contrast.targets) - targets:
                raise ValueError(f"contrast {contrast.name!r} names no recorded target: {', '.join(sorted(unknown))}")


def load_config(path: str | Path, arguments: Sequence[str] = (), experiment: str | None = None) -> Any:
    """Runs a config file and returns its `config`, changed by command line `arguments` (`--max-new-tokens 32`).

    What lies beside the file can be imported in it. `experiment` is the one that is run, and must take such a config.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file fails, sets no dataclass `config`, or a key is unknown; the message names the nearest key.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        raise FileNotFoundError(f"no config {str(path)!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    import_from_folder_of(path)
    try:
        config = runpy.run_path(str(path)).get("config")
    except Exception as error:  # whatever a user's file raises is one message with the file's line
        raise ValueError(f"{location(error, path) or path}: {_explain(error)}") from error
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"{path} must set `config` to a dataclass such as CompareConfig(...), got {config!r}")
    takes = next((TAKES[kind.__name__] for kind in type(config).__mro__ if kind.__name__ in TAKES), "")
    if experiment not in (None, takes):
        hint = f": python -m experiments.{takes} takes it" if takes else ""
        raise ValueError(f"{path} is no config of experiments.{experiment} but a {type(config).__name__}{hint}")
    return override(config, arguments, experiment and f"python -m experiments.{experiment} {path}")


def override(config: T, arguments: Sequence[str], program: str | None = None) -> T:
    """`config` with command line arguments applied.

    Raises:
        ValueError: an argument that is no field, with the nearest. --help and a refused value end the program.
    """
    if not arguments:
        return config
    options = _options(config)
    for argument in arguments:
        key = argument.split("=")[0].replace("_", "-")
        # A negative number is a value, --no-chat is tyro's way to say False.
        if key.startswith("--") and key not in [*options, "--help"] and key.replace("--no-", "--", 1) not in options:
            raise ValueError(f"unknown option {argument.split('=')[0]}{nearest(key, options)}")
    style = (tyro.conf.AvoidSubcommands,)
    read = tyro.cli(type(config), args=list(arguments), default=config, config=style, prog=program or "CONFIG.py")
    # What only a file can set is the file's: tyro makes it anew out of its fields, and a strategy is more than those.
    files = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if _is_files(f)}
    return dataclasses.replace(read, **files)


def _options(config: Any, prefix: str = "--") -> list[str]:
    """The options of a config, `--group.field` those of a dataclass in it. What only a file can set has none."""
    names = []
    for f in dataclasses.fields(config):
        value, name = getattr(config, f.name), prefix + f.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            names += _options(value, f"{name}.")
        elif not _is_files(f):
            names.append(name)
    return names


def _is_files(field: dataclasses.Field[Any]) -> bool:
    """Whether only a file can set it."""
    return "Suppress" in str(field.type) or tyro.conf.Suppress in getattr(field.type, "__metadata__", ())


def describe(value: Any) -> Any:
    """A config as JSON holds it: dataclasses are objects, a strategy is its factory with its options and the
    hyperparameters given.

    Raises:
        ValueError: a strategy that no factory under `@strategy` made.
    """
    if isinstance(value, Strategy):
        if value.call is None:
            raise ValueError(f"{value!r} was made by no factory under @strategy: nothing distinguishes it from another")
        factory = value.call.factory
        file = inspect.getsourcefile(inspect.unwrap(factory)) if definition(factory) else None
        names = {"strategy": f"{factory.__module__}:{value.call.name}"} | ({"file": _contents(file)} if file else {})
        return names | {"options": describe(value.options), "hyperparameters": describe(value.given)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(entry) for entry in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)


def config_hash(config: Any) -> str:
    """12 hex digits that change with whatever can change a result: the fields but the name's, and what files hold.

    A prompt file counts by its text and the `:n` after it, traces and costs by what is in them, wherever they lie, and
    files of rules, which strings name, by both; any other source by its name.
    """
    fields = {key: value for key, value in describe(config).items() if key not in ("name", "out", "only", "limit")}
    fields |= {key: _contents(fields[key]) for key in ("traces", "costs") if key in fields}
    source = str(fields.pop("prompts", ""))
    fields |= {"files": files} if (files := files_in(json.dumps(fields))) else {}
    path, every = re.fullmatch(r"(.*?)(:\d+)?", source, re.DOTALL).groups()  # type: ignore[union-attr]
    file = Path(source) if Path(source).is_file() else Path(path)
    text = file.read_bytes() if file.is_file() else b""
    rest = (every or "") if text and file != Path(source) else ("" if text else source)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + b"\0" + text + rest.encode()).hexdigest()[:12]


def _contents(source: Any) -> Any:
    """What files hold, as digests, in the place of their paths; a folder is the traces in it."""
    if isinstance(source, list):
        return [_contents(entry) for entry in source]
    path = Path(source) if isinstance(source, str) and source else None
    if path is None or not path.exists():
        return source
    files = sorted(path.glob("trace-*.npz")) if path.is_dir() else [path]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _explain(error: Exception) -> str:
    """The error in a line; for a misspelt keyword or import with the nearest one there is."""
    missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if missing and missing[2] in sys.modules:
        module = sys.modules[missing[2]]
        there = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
        return f"{missing[2]} has no {missing[1]!r}{nearest(missing[1], there)}"
    match = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    made = {cls.__name__: cls for cls in (Method, CompareConfig)}.get(match[1]) if match else None
    if match is None or made is None:
        return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
    return f"{match[1]} has no {match[2]!r}{nearest(match[2], [f.name for f in dataclasses.fields(made)])}"
