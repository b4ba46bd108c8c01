"""experiments.diff on run folders of known differences: what it names, what it counts as equal, what it refuses."""

import json
import math

import pytest

from configs.base import CompareConfig, Method
from experiments.diff import main, relative_change, setup_changes
from experiments.lib.run_folder import RunFolder
from experiments.lib.run_matching import MISSING, flatten, identify, match
from specdec_jax.stopping import adaedl

PLAIN = Method("plain", policy=None)


def make(path, rows, hyperparameters=None, **fields):
    """A run folder with these results, as an experiment writes it."""
    methods = (PLAIN, Method("adaedl", adaedl(**hyperparameters or {})))
    folder = RunFolder.create("tiny", CompareConfig(name="tiny", prompts="p", methods=methods, **fields), out=path)
    for row in rows:
        folder.append(row)
    return folder


def results(**changes):
    """Two prompts, two methods: rows as experiments.compare has them. `changes` go into adaedl's on prompt two."""
    rows = []
    for prompt in ("one", "two"):
        for method, seconds in (("plain", 4.0), ("adaedl", 2.0)):
            row = {"prompt_id": prompt, "method": method, "temperature": 0.8, "repeat": 0, "seconds": seconds}
            row |= {"num_rounds": 10, "equals_plain": True, "tokens": [1, 2], "finish_reason": "length"}
            rows.append(row | (changes if (prompt, method) == ("two", "adaedl") else {}))
    return rows


@pytest.fixture
def diff(tmp_path, capsys):
    """Runs the command on two lists of rows; (exit code, standard output as words, standard error)."""

    def call(a, b, *options, **fields):
        make(tmp_path / "a", a)
        make(tmp_path / "b", b, **fields)
        code = main([str(tmp_path / "a"), str(tmp_path / "b"), *options])
        told = capsys.readouterr()
        return code, " ".join(told.out.split()), told.err

    return call


def test_equal_runs_agree(diff):
    code, printed, _ = diff(results(), results())
    assert code == 0
    assert "Config, versions, devices and revision are the same." in printed
    assert "The results agree (tolerance 0; 4 rows matched by prompt_id, method)." in printed
    assert "seconds 4 0 3 3 1.000" in printed and "Largest" not in printed


def test_a_changed_number_is_shown_with_its_ratio_and_its_row(diff):
    code, printed, _ = diff(results(), results(seconds=3.0))
    assert code == 1
    assert "seconds 4 1 3 3.25 1.083" in printed  # the means
    assert "Largest changes: 1 of 1" in printed and "two, adaedl seconds 2 3 1.500" in printed
    assert "1 of 28 values differ" in printed


@pytest.mark.parametrize(
    ("b", "tolerance", "code"),
    [(2.2, "0.1", 0), (2.2, "0.09", 1), (1.8, "0.1", 0), (1.8, "0.09", 1), (2.0 + 1e-9, "0", 1), (2, "0", 0)],
)
def test_the_tolerance_is_relative_to_the_larger(diff, b, tolerance, code):
    assert diff(results(), results(seconds=b), "--tolerance", tolerance)[0] == code


def test_fields_can_be_ignored(diff):
    changed = results(seconds=3.0, num_rounds=11)
    assert diff(results(), changed, "--ignore", "seconds", "num_rounds")[0] == 0
    assert diff(results(), changed, "--ignore", "seconds")[0] == 1


@pytest.mark.parametrize(
    "change", [{"equals_plain": False}, {"tokens": [1, 3]}, {"tokens": [1]}, {"finish_reason": "stop"}, {"new": 1}]
)
def test_what_is_no_number_must_be_equal(diff, change):
    code, printed, _ = diff(results(), results(**change), "--tolerance", "0.9")
    assert code == 1 and f"two, adaedl {next(iter(change))}" in printed


def test_the_largest_changes_come_first_and_are_limited(diff):
    changed = results(seconds=3.0, num_rounds=50, tokens=[1, 3])
    _, printed, _ = diff(results(), changed, "--most", "2")
    listed = printed[printed.index("Largest changes: 2 of 3") :]
    assert listed.index("tokens [1, 2] [1, 3]") < listed.index("num_rounds 10 50 5.000") and "seconds" not in listed
    _, printed, _ = diff([], [], "--most", "0")  # the folders are there already
    listed = printed[printed.index("Largest changes: 3 of 3") :]
    assert listed.index("num_rounds") < listed.index("seconds 2 3 1.500")


def test_rows_of_one_run_only_are_named(diff):
    code, printed, _ = diff(results(), results()[:3] + [{**results()[3], "method": "svip"}])
    assert code == 1
    assert "Only in A, 1 rows: two, adaedl" in printed and "Only in B, 1 rows: two, svip" in printed
    assert "3 rows matched" in printed


def test_the_order_of_the_rows_does_not_matter(diff):
    assert diff(results(), results()[::-1])[0] == 0


def test_the_setup_is_compared_field_by_field(diff, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # no name is wrapped
    fields = {"max_new_tokens": 32, "hyperparameters": {"threshold": 0.5}}
    code, printed, _ = diff(results(), results(), **fields)
    assert code == 0  # the results agree
    assert "config.max_new_tokens 64 32" in printed
    assert "config.methods[adaedl].policy.hyperparameters.threshold (none) 0.5" in printed
    assert "config.methods[adaedl].policy.hyperparameters " not in printed  # {} against what stands inside it
    assert "config_hash" in printed and "started" not in printed and "config.out" not in printed
    for row in (tmp_path / "b" / "results.jsonl").read_text().splitlines():
        assert json.loads(row)["config_hash"] in printed


def test_versions_devices_and_revision_are_part_of_the_setup(tmp_path):
    manifest = json.loads((make(tmp_path / "a", []).path / "manifest.json").read_text())
    other = json.loads(json.dumps(manifest))
    other |= {"devices": ["gpu:0 X"], "git": {"revision": "abc", "dirty": True}, "started": "later", "command": "y"}
    other |= {"compile_seconds": {"plain": 3.0}}
    other["versions"]["jax"] = "0.0.1"
    names = [name for name, _, _ in setup_changes(manifest, other)]
    assert {"versions.jax", "devices"} < set(names) and all(name.startswith(("git", "ver", "dev")) for name in names)
    assert ("versions.jax", manifest["versions"]["jax"], "0.0.1") in setup_changes(manifest, other)


@pytest.mark.parametrize(
    ("a", "b", "keys"),
    [
        # A measured number is no key, even where it would tell rows apart.
        ([{"m": "x", "s": 1.5, "n": 3}], [{"m": "x", "s": 2.5, "n": 4}], ("m",)),
        ([{"s": 1.5 + n, "seed": n} for n in (0, 1)], [{"s": 1.6 + n, "seed": n} for n in (0, 1)], ("seed",)),
        # A seed and a sweep's number tell rows apart; a run that was stopped has fewer of them.
        (
            [{"m": "x", "seed": s, "f": f, "n": s + f} for s in (0, 1) for f in (0.1, 0.2)],
            [{"m": "x", "seed": 0, "f": f, "n": 9 + f} for f in (0.1, 0.2)],
            ("m", "seed", "f"),
        ),
        # Settings given as an object.
        ([{"set": {"k": k}, "n": k} for k in (1, 2)], [{"set": {"k": k}, "n": -k} for k in (1, 2)], ("set",)),
        # What is not in every row is none.
        ([{"m": "x", "o": "y"}], [{"m": "x"}], ("m",)),
        ([{"n": 1.0}], [{"n": 2.0}], ()),
    ],
)
def test_what_identifies_a_row_is_found(a, b, keys):
    assert identify(a, b) == keys


def test_alike_rows_are_matched_in_their_order():
    a, b = [{"m": "x", "n": 1.5}, {"m": "x", "n": 2.5}], [{"m": "x", "n": 3.5}]
    matched = match(a, b, ("m",))
    assert matched.pairs == [("x", a[0], b[0])] and matched.only_a == ["x (2)"] and matched.only_b == []
    assert [name for name, *_ in match(a, a, ()).pairs] == ["row (1)", "row (2)"]


def test_keys_can_be_named(diff):
    a = [{"m": "x", "best": "static"}, {"m": "y", "best": "static"}]
    b = [{"m": "x", "best": "svip"}, {"m": "y", "best": "static"}]
    code, printed, _ = diff(a, b, "--keys", "m")
    assert code == 1 and "x best static svip" in printed and "2 rows matched by m" in printed


@pytest.mark.parametrize(
    ("a", "b", "change"),
    [
        (2, 2.0, 0),
        (0, 0.0, 0),
        (1, 2, 0.5),
        (-1.0, 1.0, 2),
        (math.nan, math.nan, 0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0),
        (True, 1, math.inf),
        (None, 0, math.inf),
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1, 2], [1, 4], math.inf),  # token ids
        ([1], [1, 2], math.inf),
        ("a", "a", 0),
        (MISSING, 1, math.inf),
    ],
)
def test_relative_change(a, b, change):
    assert relative_change(a, b) == change


def test_flatten_names_what_lies_inside():
    nested = {"a": {"b": 1, "c": {}}, "d": [{"name": "x", "e": 2}, {"name": "y"}], "f": [1], "g": [{"name": 1}] * 2}
    assert flatten(nested) == {
        "a.b": 1,
        "a.c": {},
        "d[x].name": "x",
        "d[x].e": 2,
        "d[y].name": "y",
        "f": [1],
        "g": [{"name": 1}] * 2,
    }


def test_bad_input_is_one_error_and_2(tmp_path, capsys):
    good = str(make(tmp_path / "good", results()).path)
    make(tmp_path / "empty", [])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("[1]")
    torn = make(tmp_path / "torn", results()).path
    (torn / "results.jsonl").write_text('{"a": \n')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    for name, message in (
        ("nowhere", "nowhere' is no run folder: it has no manifest.json"),
        ("empty", "empty' has no results to compare"),
        ("other", "other/manifest.json: not the manifest of a run"),
        ("broken", "broken/manifest.json: not JSON"),
        ("torn", "torn/results.jsonl:1: not JSON"),
    ):
        for arguments in ([good, str(tmp_path / name)], [str(tmp_path / name), good]):
            assert main(arguments) == 2
            told = capsys.readouterr()
            assert message in told.err and told.err.startswith("error: ") and not told.out
    for options, message in (
        (["--tolerance", "-1"], "tolerance must be a number of 0 or more, got -1.0"),
        (["--tolerance", "nan"], "tolerance must be a number of 0 or more, got nan"),
        (["--most", "-1"], "most must be a number of 0 or more, got -1"),
        (["--keys", "promt"], "a row has no 'promt' to be matched by (it has: prompt_id"),
    ):
        assert main([good, good, *options]) == 2
        assert message in capsys.readouterr().err
