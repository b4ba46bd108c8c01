"""What people look at: colours, the live panel, the proof's table, a line of statistics."""

import io
import json

import pytest
from rich.console import Console
from scripted import OPTIONS, PROMPT, scripted_pair, tokens_of, wrong_at
from tiny_pair import write_pair

from specdec_jax import cli
from specdec_jax.analysis.losslessness import Case, LosslessReport, SampledReport
from specdec_jax.generation import Generation, generate
from specdec_jax.streaming import Piece
from specdec_jax.views import live, proof, terminal
from specdec_jax.views.printing import plain, summary

PIECES = [Piece("one", "accepted"), Piece(" 2\n", "rejected"), Piece(" two", "recovered"), Piece("\tthree", "bonus")]


def test_colours_by_kind_and_text_as_it_is():
    text = terminal.ansi(PIECES)
    assert text == "\x1b[32mone\x1b[0m\x1b[2;9;31m 2↵\x1b[0m\x1b[1;33m two\x1b[0m\x1b[1;36m\tthree\x1b[0m"
    assert terminal.ansi(PIECES, show_rejected=False).count("\x1b[") == 6
    styled = terminal.coloured(PIECES)
    assert styled.plain == "one 2↵ two\tthree" and len(styled.spans) == 4
    assert terminal.coloured(PIECES, show_rejected=False).plain == "one two\tthree"


def test_a_models_escape_codes_are_shown_and_not_obeyed():
    assert "\x1b[31mred" not in terminal.ansi([Piece("\x1b[31mred", "bonus")])
    assert "␛[31mred" in terminal.ansi([Piece("\x1b[31mred", "bonus")])


def test_the_legend_names_every_kind_that_is_shown():
    assert terminal.legend().plain.count("   ") == 3
    assert "rejected" not in terminal.legend(show_rejected=False).plain


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"force_terminal": True, "color_system": "truecolor"}, True),
        ({"force_terminal": False}, False),
        ({"force_terminal": True, "no_color": True}, False),
        ({"force_terminal": True, "color_system": None}, False),  # TERM=dumb
    ],
)
def test_colours_only_where_they_are_wanted(options, wanted):
    assert terminal.shows_colours(Console(file=io.StringIO(), **options)) is wanted


def shown(width=60, height=20):
    """What a live view writes, its control codes taken out, and its Generation."""
    script = tokens_of("one two three four")
    pair = scripted_pair(script, wrong_at(script, 5))
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    result = live.show_live(console, pair, "[static]", PROMPT, max_new_tokens=64, **OPTIONS)
    return console.file.getvalue(), result, pair


def test_the_live_view_ends_with_the_whole_text_and_its_figures():
    text, result, pair = shown()
    assert result.tokens == generate(PROMPT, pair=pair, max_new_tokens=64, record=True, **OPTIONS).tokens
    end = text[text.rindex("╭") :]
    assert "[static]: x" in end  # a title is text, not markup
    assert "one t#" in end and "rejected draft" in end
    assert f"{len(result.tokens)} tokens, {result.statistics['num_rounds']} target passes" in end


def test_a_text_too_tall_for_the_terminal_shows_its_end():
    text = terminal.coloured([Piece(f"line {n}\n", "bonus") for n in range(50)])
    console = Console(file=io.StringIO(), width=40, height=20)
    last = live._end_of(text, console).plain
    assert "line 49" in last and "line 30" not in last and last.count("\n") < 12


def generation(**changes):
    figures = {
        "num_draft_tokens": 10,
        "draft_acceptance_rate": 0.5,
        "mean_draft_length": 2.5,
        "mean_acceptance_length": 2.25,
        "drafter_passes": 12,
        "checked_passes": 2,
    }
    fields = {"text": "x", "tokens": [1] * 20, "prompt_tokens": [1], "finish_reason": "length", "seconds": 2.0}
    fields |= {"statistics": figures | changes.pop("statistics", {}), "prefill_seconds": 0.0, "compile_seconds": 0.0}
    return Generation(**{**fields, **changes})


def test_the_line_of_statistics():
    assert summary(generation()) == (
        "[20 tokens, 10.0 tokens/s, 50% of drafts accepted, mean draft 2.50, mean acceptance length 2.25, "
        "reached max-new-tokens]"
    )
    nothing = summary(generation(statistics={"num_draft_tokens": 0}, finish_reason="stop", compile_seconds=3.21))
    assert "nothing drafted" in nothing and "lower threshold" in nothing
    assert nothing.endswith("compiled in 3.2 s, ended]")
    without = {"num_draft_tokens": 0, "drafter_passes": 0}
    assert summary(generation(statistics=without, seconds=0.0)) == "[20 tokens, reached max-new-tokens]"


def test_nothing_that_is_no_json_gets_through():
    import numpy as np

    value = {"a": float("nan"), "b": [np.float32(2), np.array([np.inf, 1])], "c": (np.int32(3), None, True)}
    assert json.dumps(plain(value), allow_nan=False) == '{"a": null, "b": [2.0, [null, 1.0]], "c": [3, null, true]}'


BIASED = '''
import jax.numpy as jnp
from specdec_jax.verification.rejection import rejection

def generous():
    """Accepts more than it may."""
    fair = rejection()

    def law(state, draft, laws, log_p, context):
        log_length, next_law, state = fair.law(state, draft, laws, log_p + 0.3, context)
        return log_length, lambda accepted: fair.law(state, draft, laws, log_p, context)[1](accepted), state

    return fair._replace(law=law)
'''


def verify(capsys, *arguments):
    code = cli.main(["verify-lossless", *arguments, "--sequences", "2048"])
    return code, capsys.readouterr().out


def test_a_proof_that_succeeds(capsys):
    code, out = verify(capsys, "--policy-options", "threshold=0.5", "keep_checked_token=true")
    assert code == 0 and out.endswith("Lossless.\n")
    assert out.count("e-1") >= 24 and "2048 sequences of 4 tokens" in out.replace("\n", " ")
    assert max(map(len, out.splitlines())) <= 80


def test_a_verifier_that_is_not_lossless_fails_with_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "_sampled_on_toy", lambda *args: SampledReport(3.0, 4, 0.5, 100, 4, 5, True))
    (tmp_path / "generous.py").write_text(BIASED)
    code, out = verify(capsys, "--policy", "static", "--verifier", str(tmp_path / "generous.py"), "--json")
    report = json.loads(out)
    assert code == 1 and report["lossless"] is False and report["drafted"] is True
    assert report["exact"]["total_variation"] > 0.01 and len(report["exact"]["cases"]) == 60


def verdict(distance=0.0, lengths=(0, 2), p_value=0.5, pair=None):
    """What the table says of such findings, and its text."""
    case = Case(0, {"temperature": 0.5, "top_k": 2}, 3, False, distance, lengths)
    sampled = SampledReport(3.0, 4, p_value, 100, 4, 5, p_value > 1e-4)
    found = proof.Proof(LosslessReport(distance, distance < 1e-6, lengths, (case,)), sampled, pair and sampled)
    console = Console(file=io.StringIO(), width=80)
    proof.show(found, console, "mine")
    text = console.file.getvalue()
    return text.splitlines()[-1], text.replace("\n", " ")


def test_the_verdict_needs_every_proof_and_a_draft():
    assert verdict()[0] == "Lossless."
    assert verdict(distance=1e-3)[0] == "NOT lossless." and "1.0e-03" in verdict(distance=1e-3)[1]
    assert verdict(p_value=1e-9)[0] == "NOT lossless." and "p = 1e-09" in verdict(p_value=1e-9)[1]
    assert verdict(p_value=1e-9, pair=True)[1].count("1e-09") == 2
    assert "never drafted" in verdict(lengths=(0,))[0]
    assert "temperature 0.5, top-k 2" in verdict()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "adadl"], "unknown policy 'adadl'; did you mean 'adaedl'"),
        (["--target", "smollm2"], "a pair needs both models: --target is smollm2, --drafter is None"),
        (["--sequences", "0"], "sequences must be at least 1, got 0"),
        (["--verifier", "greedy", "--target", "a", "--drafter", "b"], "needs temperature 0 on the pair, got 1"),
    ],
)
def test_bad_input_of_the_proof_is_one_line(capsys, arguments, message):
    assert cli.main(["verify-lossless", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_proof_runs_on_a_users_own_pair(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "prove_exactly", lambda *args, **options: LosslessReport(0.0, True, (0, 2), ()))
    monkeypatch.setattr(proof, "_sampled_on_toy", lambda *args: SampledReport(3.0, 4, 0.5, 100, 4, 5, True))
    target, drafter = write_pair(tmp_path)
    models = [
        "--target",
        target,
        "--drafter",
        drafter,
        "--prompt",
        "hello",
        "--pair-sequences",
        "300",
        "--temperature",
        "0.3",
    ]
    code, out = verify(capsys, "--policy", "static", *models, "--json")
    report = json.loads(out)
    assert code == 0 and report["pair"]["lossless"] and report["pair"]["sequences"] == 300
    assert report["pair"]["degrees"] > 3
