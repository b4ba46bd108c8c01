"""The command's verdict on cheats and honest rules: exit code, counterexample, scope; and on files that fail."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from specdec_jax import lossless
from specdec_jax.app import cli
from specdec_jax.app.views import proof
from specdec_jax.decoding import decoder
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.lossless import SampledReport, together
from specdec_jax.lossless.counterexample import Counterexample, first_wrong, shortest
from specdec_jax.lossless.sampled import _stops_and_widths
from specdec_jax.stopping import static
from specdec_jax.verification import block, rejection

pytestmark = pytest.mark.slow

CHEATS = Path(__file__).parents[1] / "cheats"
WARPS = ({"temperature": 1.0}, {"temperature": 0.0})
PASSED = SampledReport(3.0, 4, 0.5, 100, 4, 5, True, (0.5, 0.5), (90, 20), 7, (1, 2, 3))
TEXTS = lossless.LongTextsReport((0.5, 0.5), 256, 64, 20, True, True)

ENUMERATED = lossless.LosslessReport(0.0, True, (0, 2), ())
COVERED = lossless.Coverage(*(np.ones(size, int) for size in (2, 2, 3, 3)))
ROUNDS = lossless.RoundsReport(0.0, True, (lossless.RoundsCase(WARPS[0], 0.0, 7, COVERED),))


@pytest.fixture
def small(monkeypatch):
    """The command with smaller proofs, and none by sampling."""
    sizes = {
        "prove_exactly": {"batches": (3,), "warps": WARPS, "toys": lossless.TOYS[:1]},
        "prove_long_drafts": {"warps": WARPS},
        "prove_together": {"rounds": 2},
        "prove_verifier": {"lengths": (0, 6)},
        "prove_real_size": {"vocab_size": 4096},
    }
    for name, options in sizes.items():
        monkeypatch.setattr(proof, name, functools.partial(getattr(proof, name), **options))
    monkeypatch.setattr(proof, "_sampled_on_toy", lambda *arguments, **options: PASSED)
    monkeypatch.setattr(proof, "prove_long_texts", lambda *arguments, **options: TEXTS)


@pytest.fixture
def rows_and_sizes(small, monkeypatch):
    """Of the proofs only those of rows side by side, of the verifier alone, and in float32."""
    monkeypatch.setattr(proof, "prove_exactly", lambda *arguments, **options: ENUMERATED)
    monkeypatch.setattr(proof, "prove_long_drafts", lambda *arguments, **options: ROUNDS)


def run(capsys, *arguments):
    code = cli.main(["verify-lossless", "--max-draft-length", "2", "--seed", "3", *arguments])
    said = capsys.readouterr()
    return code, " ".join(said.out.split()), said.err


VERDICTS = {
    "forgets_one_hot.py": (1, "round by round"),
    "first_rows_temperature.py": (1, "at position 1"),
    "no_drafts.py": (1, "with the draft of no tokens"),
    "two_truncations.py": (1, "top-k 3, top-p 0.9"),
    "at_08.py": (1, "at temperature 0."),
    "late_draft.py": (1, "at position 6"),
    "eps_guard.py": (1, "float32, 4,096 tokens"),
    "half_precision.py": (1, "float32, 4,096 tokens"),
    "lenience": (1, "Smallest counterexample"),
    "rejection": (0, "Lossless for drafts of up to 2 tokens, chains, batches of mixed warps, model, lookup and mixed"),
    "block": (0, "Lossless for drafts of up to 2 tokens"),
    "traversal": (0, "Lossless for drafts of up to 2 tokens"),
    "greedy": (0, "chains, temperature 0, model, lookup and mixed drafters, at these hyperparameters."),
}


@pytest.mark.parametrize("file", VERDICTS)
def test_the_verdict_on_a_verifier(file, rows_and_sizes, capsys, monkeypatch):
    monkeypatch.setattr(decoder, "_warned", set())  # warnings are given once a process
    code, says = VERDICTS[file]
    words = str(CHEATS / file) if file.endswith(".py") else file
    found, out, err = run(capsys, "--policy", "adaedl", "--verifier", words)
    assert found == code and says in out
    assert err.startswith("warning: lenience verification is lossy") if file == "lenience" else err == ""
    assert out.endswith("NOT lossless.") == (code == 1) and ("Smallest counterexample: " in out) == (code == 1)
    assert ("should be" in out) == (code == 1) and "--seed 3 draws them again" in out


@pytest.mark.often(1)
@pytest.mark.parametrize("monitor", [(), ("--monitor", "phases")])
def test_a_rule_that_reads_the_monitors_entropy_is_judged(monitor, small, capsys):
    code, out, err = run(capsys, "--policy", str(CHEATS / "reads_entropy.py"), *monitor)
    assert (code, err) == (3, "") and "Not shown beyond draft 1: the rule never said no to draft 2." in out


@pytest.fixture
def nothing_else(monkeypatch):
    """The command without what it proves on toys of its own."""
    found = proof.Proof(ENUMERATED, ROUNDS, ROUNDS, PASSED, PASSED)
    monkeypatch.setattr(proof, "_on_toys", lambda *arguments: found)


@pytest.mark.often(2)
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("drafter", "code", "says"),
    [
        (str(CHEATS / "wrong_log_q.py"), 1, "(samples)"),
        ("prompt_lookup(longest=2)", 0, "one warp, model drafters and this one, at these hyperparameters"),
        ("nothing.py", 3, "Not shown: this drafter drafted nothing on the toy's text."),
        (str(CHEATS / "always_token_0.py"), 1, "(samples)"),
    ],
)
def test_a_users_drafter_is_sampled_without_a_pair(drafter, code, says, nothing_else, capsys, tmp_path):
    """It drafts all lengths in turn, whatever the rule: AdaEDL refuses what some of these offer."""
    if drafter == "nothing.py":
        drafter = str(tmp_path / drafter)
        Path(drafter).write_text(
            "from specdec_jax.drafters import prompt_lookup\n"
            "def nothing(max_draft_length=2):\n"
            "    return prompt_lookup(max_draft_length, longest=50, shortest=50, vocab_size=6)\n"
        )
    found, out, _ = run(capsys, "--policy", "adaedl", "--drafter", drafter, "--sequences", "8192")
    assert found == code and says in out and "Sampled with your drafter" in out


FAILING = {
    "verifier": (
        "from specdec_jax.verification import rejection\n"
        "def bad():\n"
        "    def verify(state, draft, distributions, context):\n"
        "        return draft.no_such_field\n"
        "    return rejection().replace(verify=verify)\n",
        "bad.py:4: AttributeError",
    ),
    "policy": (
        "from specdec_jax.stopping import static\n"
        "def bad():\n"
        "    def update(state, draft, result):\n"
        "        return state if draft.tokens.shape[1] == 3 else int(draft.length[0])\n"
        "    return static().replace(update=update)\n",
        "bad.py:4: no Python number can be made of an array",
    ),
    "drafter": (
        "from specdec_jax.drafters import prompt_lookup\n"
        "def bad(max_draft_length=3):\n"
        "    def source(*arguments):\n"
        "        return 1 / 0\n"
        "    return prompt_lookup(max_draft_length).replace(source=source)\n",
        "bad.py:4: ZeroDivisionError: division by zero",
    ),
    "monitor": (
        "from specdec_jax.monitors import phases\n"
        "def bad():\n"
        "    def observe(state, logits, result, context):\n"
        "        raise RuntimeError('no\\nmore')\n"
        "    return phases().replace(observe=observe)\n",
        "bad.py:4: RuntimeError: no more",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_error_in_a_users_file_is_one_line_and_2(kind, capsys, tmp_path, request):
    source, says = FAILING[kind]
    if kind == "drafter":
        request.getfixturevalue("nothing_else")
    (tmp_path / "bad.py").write_text(source)
    code, out, err = run(capsys, f"--{kind}", str(tmp_path / "bad.py"))
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err and err.startswith("error: ")


def test_temperatures_are_drawn_by_the_seed_alone_one_in_each_tenth():
    warps = together.drawn_warps(5)
    assert warps == together.drawn_warps(5) != together.drawn_warps(6)
    temperatures = [warp["temperature"] for warp in warps[2:]]
    edges = np.linspace(together.COOLEST, together.WARMEST, len(temperatures) + 1)
    assert np.all((edges[:-1] <= temperatures) & (temperatures <= edges[1:]))
    assert sum(len(warp) > 2 for warp in warps) == 8  # two truncations or more


def test_rows_of_a_batch_have_their_warps_and_drafts_of_every_kind(monkeypatch):
    """Rows get the numbers of their table, and each batch that a verifier sees is a mixture."""
    seen, real = [], rejection()

    def verify(state, draft, distributions, context):
        seen.append((draft.one_hot, context.warp))
        return real.verify(state, draft, distributions, context)

    warps, settings = ({"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "min_p": 0.2}, {"temperature": 0.0}), []
    play = together.play
    monkeypatch.setattr(together, "play", lambda setting, *rest: settings.append(setting) or play(setting, *rest))
    report = lossless.prove_together(
        static(), real.replace(verify=verify), warps=warps, max_draft_length=2, toys=together.SMALL, prompts=5, rounds=1
    )
    assert report.lossless and seen
    rows = len(settings[0].target_distributions.log_prob) // 3
    table = np.array([0, rows - 1, rows, 2 * rows])
    numbers = make_warp(4, **together_numbers(settings[0], table))
    np.testing.assert_array_equal(numbers.temperature, np.float32([0.5, 0.5, 2.0, 0.0]))
    np.testing.assert_array_equal(numbers.top_k, [3, 3, 0, 0])
    np.testing.assert_array_equal(numbers.min_p, np.float32([0.0, 0.0, 0.2, 0.0]))


def together_numbers(setting, table):
    from specdec_jax.lossless.nodes import chosen_at, numbers_at

    one_hot = chosen_at(setting, np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0]]))
    np.testing.assert_array_equal(one_hot, [[False, False], [True, True], [True, False], [False, True]])
    return numbers_at(setting, table)


def test_passes_of_all_widths_occur_when_lengths_go_in_turn():
    decoder, params = lossless.toy_decoder(together.in_turn(2), block(), 2, distance=0.5, widths=(1, 2, 3))
    report = lossless.test_by_sampling(decoder, params, tokens=6, sequences=512, batch=256)
    assert report.widths == (1, 2, 3) and report.stopped > 0 and report.lossless


def test_stops_are_rounds_with_fewer_drafts_than_there_was_room_for():
    class Record(NamedTuple):
        drafted: np.ndarray
        emitted: np.ndarray
        width: np.ndarray

    whole = Record(np.array([[2, 2, 1, 0], [2, 2, 0, 0]]), np.array([[1, 3, 1, 1], [3, 3, 0, 0]]), np.full((2, 4), 3))
    assert _stops_and_widths(whole, 6, 2, 2) == (0, {3})  # budgets shrink at the end, and finished rows draft nothing
    assert _stops_and_widths(whole._replace(drafted=whole.drafted * [1, 0, 1, 1]), 6, 2, 2) == (2, {3})
    assert _stops_and_widths(whole._replace(drafted=whole.drafted * [1, 0, 1, 1]), 6, 2, 1) == (1, {3})


def test_the_shortest_counterexample_is_shown():
    target = np.full((2, 2), 0.25)
    joint = np.array([[0.25, 0.25], [0.4, 0.1]])
    assert first_wrong(target, target, 1e-6) is None
    assert first_wrong(joint, target, 1e-6) == ((1, 0), pytest.approx(0.8), 0.5)
    joint = np.array([[0.4, 0.2], [0.2, 0.2]])
    assert first_wrong(joint, target, 1e-6) == ((0,), pytest.approx(0.6), 0.5)
    target = np.array([[0, 0, 0], [1 / 3] * 3, [0, 0, 0]])  # a text that the target never writes, within the tolerance
    joint = np.array([[0.09, 0, 0], [0.37, 0.27, 0.27], [0, 0, 0]])
    assert first_wrong(joint, target, 0.1) == ((0, 0), 1.0, 0.0)
    one = Counterexample("all rounds", (0, 1), {"temperature": 1.0}, (2, 1), 2, 0.25, 0.5, draft=(2, 1, 0))
    later, drawn = one._replace(position=3), one._replace(position=1, sampled=True)
    assert shortest([None, later, drawn, one]) == one and shortest([None]) is None
    assert proof.counterexample_text(one) == (
        "after the text 0 1, at temperature 1, for example with the draft 2 1 0: token 1 at position 2 after 2 has "
        "probability 0.25, should be 0.5 (all rounds)"
    )
