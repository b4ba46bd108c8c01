"""What people look at: colours, the live panel, the proof's table, a line of statistics."""

import io
import json
import os
import signal

import numpy as np
import pytest
from rich.console import Console
from scripted import OPTIONS, PROMPT, scripted_pair, tokens_of, wrong_at
from tiny_pair import write_pair

from specdec_jax import lossless
from specdec_jax.app import cli
from specdec_jax.app.views import live, proof, terminal
from specdec_jax.app.views.printing import plain, summary
from specdec_jax.lossless import (
    Case,
    Coverage,
    LongTextsReport,
    LosslessReport,
    RoundsCase,
    RoundsReport,
    SampledReport,
)
from specdec_jax.lossless.conclusion import LOSSLESS, NOT_LOSSLESS, NOT_SHOWN, Proof
from specdec_jax.stopping import static
from specdec_jax.text.generation import Generation, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import Piece
from specdec_jax.verification import rejection

pytestmark = pytest.mark.slow

PIECES = [Piece("one", "accepted"), Piece(" 2\n", "rejected"), Piece(" two", "recovered"), Piece("\tthree", "bonus")]


def test_colours_by_kind_and_text_as_it_is():
    text = terminal.ansi(PIECES)
    assert text == "\x1b[32mone\x1b[0m\x1b[2;9;31m 2↵\x1b[0m\x1b[1;33m two\x1b[0m\x1b[1;36m\tthree\x1b[0m"
    assert terminal.ansi(PIECES, show_rejected=False).count("\x1b[") == 6
    styled = terminal.coloured(PIECES)
    assert styled.plain == "one 2↵ two\tthree" and len(styled.spans) == 4
    assert terminal.coloured(PIECES, show_rejected=False).plain == "one two\tthree"
    escaped = terminal.ansi([Piece("\x1b[31mred", "bonus")])  # a model's codes are shown and not obeyed
    assert "\x1b[31mred" not in escaped and "␛[31mred" in escaped


def test_colours_only_where_they_are_wanted():
    dumb = {"force_terminal": True, "color_system": None}  # TERM=dumb
    for options in ({"force_terminal": False}, {"force_terminal": True, "no_color": True}, dumb):
        assert not terminal.shows_colours(Console(file=io.StringIO(), **options))
    assert terminal.shows_colours(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor"))


def test_the_live_view_ends_with_the_whole_text_and_its_figures():
    script = tokens_of("one two three four")
    pair, sampling = scripted_pair(script, wrong_at(script, 5)), SamplingParams(max_new_tokens=64)
    console = Console(file=io.StringIO(), width=60, height=20, force_terminal=True, color_system=None)
    result = live.show_live(console, pair, "[static]", PROMPT, sampling, **OPTIONS)
    assert result.tokens == generate(PROMPT, sampling, pair=pair, record=True, **OPTIONS).tokens
    text = console.file.getvalue()
    end = text[text.rindex("╭") :]
    assert "[static]: x" in end  # a title is text, not markup
    assert "one t#" in end and "rejected draft" in end
    assert f"{len(result.tokens)} tokens, {result.statistics['num_rounds']} target passes" in end


def generation(statistics=None, **changes):
    figures = {"num_draft_tokens": 10, "draft_acceptance_rate": 0.5, "mean_draft_length": 2.5, "drafter_passes": 12}
    figures |= {"mean_acceptance_length": 2.25, "discarded_passes": 2, "num_reasoning_tokens": 0, **(statistics or {})}
    made = Generation("x", [1] * 20, [1], "length", figures, 2.0, 0.0, 0.0)
    return made._replace(**changes)


def test_the_line_of_statistics():
    for figure in ("20 tokens", "10.0 tokens/s", "50% of drafts", "draft 2.50", "length 2.25", "reached max"):
        assert figure in summary(generation())
    nothing = summary(generation(statistics={"num_draft_tokens": 0}, finish_reason="stop", compile_seconds=3.21))
    assert "nothing drafted" in nothing and nothing.endswith("compiled in 3.2 s, ended]")
    assert "25% in reasoning phases" in summary(generation(statistics={"num_reasoning_tokens": 5}))
    counted = generation(statistics={"num_rounds": 8, "num_emitted_tokens": 20})  # and 12 drafter passes
    assert "predicted 2.17 times plain decoding" in summary(counted, drafter_cost=0.1)  # 20 / (8 + 1.2)
    assert "predicted 2.50 times" in summary(counted, drafter_cost=0.0)


def test_nothing_that_is_no_json_gets_through():
    value = {"a": float("nan"), "b": [np.float32(2), np.array([np.inf, 1])], "c": (np.int32(3), None, True)}
    assert json.dumps(plain(value), allow_nan=False) == '{"a": null, "b": [2.0, [null, 1.0]], "c": [3, null, true]}'


BIASED = '''
import jax.numpy as jnp
from specdec_jax.verification.rejection import rejection

def generous():
    """Accepts more than it may."""
    fair = rejection()

    def verify(state, draft, distributions, context):
        kinder = distributions._replace(log_prob=distributions.log_prob + 0.3)
        log_prob_accepted, next_distribution, state = fair.verify(state, draft, kinder, context)
        honest = lambda accepted: fair.verify(state, draft, distributions, context)[1](accepted)  # noqa: E731
        return log_prob_accepted, honest, state

    return fair.replace(verify=verify)
'''


def verify(capsys, *arguments):
    code = cli.main(["verify-lossless", *arguments, "--sequences", "2048"])
    return code, capsys.readouterr().out


@pytest.mark.optimised
def test_a_proof_that_succeeds(capsys):
    code, out = verify(capsys, "--policy", "adaedl(threshold=0.5, keep_checked_token=true)")
    assert code == 0 and "Lossless for drafts of up to 5 tokens" in " ".join(out.split())
    assert out.count("e-1") >= 24 and max(map(len, out.splitlines())) <= 80


@pytest.mark.optimised
def test_a_verifier_that_is_not_lossless_fails_with_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "_sampled_on_toy", lambda *args, **toy: SAMPLED)
    monkeypatch.setattr(proof, "prove_long_texts", lambda *rules, **options: TEXTS)
    (tmp_path / "generous.py").write_text(BIASED)
    code, out = verify(capsys, "--policy", "static", "--verifier", str(tmp_path / "generous.py"), "--json")
    report = json.loads(out)
    assert code == 1 and report["lossless"] is False and report["conclusion"] == "not lossless"
    wrong = report["counterexample"]  # of which token depends on the temperatures that are drawn
    assert wrong["position"] == 1 and abs(wrong["probability"] - wrong["expected"]) > 0.01
    exact, rounds = report["exact"], report["rounds"]
    assert exact["total_variation"] > 0.01 and len(exact["cases"]) == 60 and rounds["error"] > 0.01
    assert len(rounds["cases"]) == 5 and len(rounds["cases"][0]["coverage"]["asked"]) == 5


TEXTS = LongTextsReport((0.5, 0.5), 256, 64, 20, True, True)
SAMPLED = SampledReport(3.0, 4, 0.5, 100, 4, 5, True, (0.5, 0.5), (90, 20, 3), stopped=7)
WHOLE = Coverage(*map(np.array, ([9, 8, 7], [1, 0, 1], [1, 1, 1, 6], [2, 2, 2, 3])))
COLD = {"temperature": 0.0}


def rounds_of(coverage=WHOLE, error=0.0, alone=True, elsewhere=WHOLE):
    cases = RoundsCase({"temperature": 0.5}, error, 7, coverage), RoundsCase(COLD, error, 7, elsewhere)
    return RoundsReport(error, error < 1e-6 and alone, cases, alone)


def conclusion(distance=0.0, p_value=0.5, pair=None, rounds=None, to_the_end=None, **changes):
    """What the table says of such findings: the conclusion's line, all text, and the conclusion."""
    case = Case(0, {"temperature": 0.5, "top_k": 2}, 3, False, distance, (0, 2))
    sampled = SAMPLED._replace(p_value=p_value, lossless=p_value > 1e-4, **changes)
    exact = LosslessReport(distance, distance < 1e-6, (0, 2), (case,))
    found = Proof(exact, rounds or rounds_of(), to_the_end or rounds_of(), sampled, sampled, pair and sampled)
    console = Console(file=io.StringIO(), width=300)
    proof.show(found, console, "mine", "drafts of up to 3 tokens", 5)
    text = console.file.getvalue()
    return text.splitlines()[-1], text, found.conclusion


def test_the_conclusion_needs_every_proof():
    assert conclusion()[0] == "Lossless for drafts of up to 3 tokens." and conclusion(pair=True)[2] == LOSSLESS
    assert conclusion(stopped=0)[0].endswith("3 tokens; in the sampled test the rule never stopped.")
    assert conclusion(drafted=(9, 0, 0))[0].endswith("in the sampled test drafts of 2, 3 tokens never occurred.")
    assert conclusion(distance=1e-3)[0] == "NOT lossless." and "1.0e-03" in conclusion(distance=1e-3)[1]
    assert conclusion(p_value=1e-9)[0] == "NOT lossless." and "p = 1e-09" in conclusion(p_value=1e-9)[1]
    assert conclusion(rounds=rounds_of(error=1e-3))[2] == NOT_LOSSLESS
    assert conclusion(to_the_end=rounds_of(error=1e-3))[2] == NOT_LOSSLESS
    assert "depend on its neighbours" in conclusion(rounds=rounds_of(alone=False))[1]
    assert conclusion(rounds=rounds_of(alone=False))[2] == NOT_LOSSLESS
    short = SAMPLED._replace(drafted=(9, 1, 0))  # on the pair, drafts of 3 tokens never occurred
    found = Proof(LosslessReport(0.0, True, (0, 2), ()), rounds_of(), rounds_of(), SAMPLED, SAMPLED, short)
    assert found.conclusion == NOT_SHOWN and found.shown == 2


def covered(asked=WHOLE.asked, declined=WHOLE.declined, accepted=WHOLE.accepted):
    return WHOLE._replace(asked=np.array(asked), declined=np.array(declined), accepted=np.array(accepted))


@pytest.mark.parametrize(
    ("found", "beyond", "says"),
    [
        ({"rounds": rounds_of(covered(declined=[1, 3, 0]))}, 2, "never said no to draft 3 (at temperature 0.5)"),
        ({"rounds": rounds_of(covered(declined=[0, 0, 0]))}, 0, "never said no to drafts 1, 2, 3 (at temperature 0.5)"),
        ({"rounds": rounds_of(elsewhere=covered([9, 9, 0], [0, 9, 0]))}, 2, "draft 3 never came up (at temperature 0)"),
        ({"to_the_end": rounds_of(covered(accepted=[5, 5, 5, 0]))}, 2, "it never happened that 3 drafts were accepted"),
    ],
)
def test_what_was_not_tried_is_named(found, beyond, says):
    _, text, what = conclusion(**found)
    assert what == NOT_SHOWN and f"Not shown beyond draft {beyond}: " in text and says in text
    assert "Lossless" not in text and "--max-draft-length" in text


@pytest.mark.seldom
@pytest.mark.optimised
def test_the_proof_runs_on_a_users_own_pair(capsys, tmp_path, monkeypatch):
    found = Proof(LosslessReport(0.0, True, (0, 2), ()), rounds_of(), rounds_of(), SAMPLED, SAMPLED)
    monkeypatch.setattr(proof, "_on_toys", lambda *args: found)
    target, drafter = write_pair(tmp_path)
    models = ["--target", target, "--drafter", drafter, "--prompt", "hello", "--temperature", "0.3"]
    code, out = verify(capsys, "--policy", "static", *models, "--pair-sequences", "300", "--json")
    pair = json.loads(out)["pair"]
    assert code == 0 and pair["lossless"] and pair["sequences"] == 300 and pair["degrees"] > 3
    assert pair["tokens"] == 8 == len(pair["by_position"])  # drafts of 7, the length in use
    assert pair["drafted"][-1] > 0


def test_the_pairs_test_says_how_long_and_stops_with_what_it_has(capsys):
    with proof.stoppable(512) as progress:
        assert progress(32, 0.0) and progress(64, 2.0)
        assert "about 28 s left" in capsys.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        assert not progress(192, 4.0)
    decoder, params = lossless.toy_decoder(static(), rejection())
    stopped = lossless.test_by_sampling(
        decoder, params, sequences=4096, batch=1024, progress=lambda done, _: done < 2048
    )
    assert stopped.sequences == 2048 and stopped.lossless
