"""What people look at: colours, the proof, a text token by token and as a page."""

import io
import json
import math
import re
import shutil
import sys
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from pages import blocks
from rich.console import Console
from scripted import OPTIONS, PROMPT, scripted_pair, tokenizer, tokens_of, wrong_at

from specdec_jax.app import cli
from specdec_jax.app.chat.commands import Chat
from specdec_jax.app.chat.terminal import Terminal
from specdec_jax.app.views import printing, proof
from specdec_jax.app.views.page import bound, page, phases_of, save_page
from specdec_jax.app.views.page import tokens_of as tokens_shown
from specdec_jax.app.views.printing import print_json, print_stream, summary
from specdec_jax.contrib.beam_search import Hypothesis
from specdec_jax.contrib.beam_search.command import print_beams
from specdec_jax.decoding.statistics import no_counts
from specdec_jax.decoding.summaries import summarise
from specdec_jax.loading import load_model
from specdec_jax.lossless import FALSE_ALARM, Counterexample, Coverage, Proof, Row
from specdec_jax.stopping import adaedl, at_least, max_confidence, phase_length, survival, svip, update_every
from specdec_jax.text.calibration import fingerprint
from specdec_jax.text.escapes import CONTROL
from specdec_jax.text.generation import Generation, generate
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import Piece, stream

PIECES = [Piece("one", "accepted"), Piece(" 2\n", "rejected"), Piece(" two", "recovered"), Piece("\tthree", "bonus")]


def test_colours_by_kind_text_as_it_is_and_none_where_they_are_not_wanted():
    text = printing.streamed(PIECES, "", True)
    assert text == "\x1b[32mone\x1b[0m\x1b[2;9;31m 2↵\x1b[0m\x1b[1;33m two\x1b[0m\x1b[1;36m\tthree\x1b[0m"
    dumb = {"force_terminal": True, "color_system": None}  # TERM=dumb
    for options in ({"force_terminal": False}, {"force_terminal": True, "no_color": True}, dumb):
        assert not printing.shows_colours(Console(file=io.StringIO(), **options))
    assert printing.shows_colours(Console(file=io.StringIO(), force_terminal=True, color_system="truecolor"))


DANGER = "\x1b[2J\x07\b\r\x85\x9b\x7f\u061c\u200f\u202e\u2069"
SAFE = "".join(f"\\u{ord(each):04x}" if each not in "[2J" else each for each in DANGER)


@pytest.mark.parametrize("isatty, compatible, no_color", [(1, "", ""), (1, "0", "1"), (0, "1", "1"), (0, "0", "1")])
def test_no_text_controls_a_terminal_and_files_get_it_unchanged(capsys, monkeypatch, isatty, compatible, no_color):
    for name, value in (("NO_COLOR", no_color), ("TERM", "xterm"), ("TTY_COMPATIBLE", compatible)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: isatty)
    is_terminal = bool(isatty) or compatible == "1"
    text = f"a\t{DANGER}b"
    run = lambda: stream(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, **OPTIONS)  # noqa: E731
    pair, beam = scripted_pair(tokens_of(text), tokens_of("ax")), Hypothesis(text, [1], "length", 0.0, 0.0)
    talk, pieces = Terminal(Chat(None), ""), [Piece(text, "accepted")]
    writes = [lambda: print_stream(run(), statistics=False), lambda: print_json(run())]
    writes += [lambda: print_beams([beam], statistics=False), lambda: print_beams([beam], True)]
    writes += [lambda: talk._print(pieces, text)]
    for write in writes:
        write()
        out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        assert bool(CONTROL.search(out)) == (not is_terminal), out
        plain = json.loads(out)["text"] if out.startswith("{") else out
        assert (text if out.startswith("{") or not is_terminal else SAFE) in plain


def generation(statistics=None):
    figures = {"num_draft_tokens": 10, "draft_acceptance_rate": 0.5, "mean_draft_length": 2.5, "drafter_passes": 12}
    figures |= {"mean_acceptance_length": 2.25, "discarded_passes": 2, "num_reasoning_tokens": 0, **(statistics or {})}
    return Generation("x", [1] * 20, [1], "length", figures, 2.0, 0.0, 0.0)


def test_the_line_of_statistics(stored):
    counted = generation(statistics={"num_rounds": 8, "num_emitted_tokens": 20})  # and 12 drafter passes
    lines = [summary(generation()), summary(generation(statistics={"num_reasoning_tokens": 5}))]
    lines += [summary(counted, drafter_cost=cost) for cost in (0.1, 0.0)]  # 20 / (8 + 1.2), 20 / 8
    stored("statistics.txt", "\n".join(lines))


def test_nothing_that_is_no_json_gets_through():
    value = {"a": float("nan"), "b": [np.float32(2), np.array([np.inf, 1])], "c": (np.int32(3), None, True)}
    assert json_text(value) == '{"a": null, "b": [2.0, [null, 1.0]], "c": [3, null, true]}'


ROW = Row("rounds of the policy", "40 rounds", 40, 2e-7, 1e-5, True)
P_VALUE = Row("the whole decoder", "9 texts", 9, 0.5, FALSE_ALARM, True)
COVERED = Coverage(*map(np.array, ([9, 8], [1, 0], [1, 1, 6], [2, 2, 3])))
PROVEN = Proof((ROW, P_VALUE), COVERED, None, (), 7, 1, 60.0, ())
WRONG = Counterexample("round by round", (0, 1), {"temperature": 1.0}, (2, 1), 0.25, 0.5, draft=(2, 1, 0))


def verify(capsys, monkeypatch, *arguments, **changes):
    """(exit code, output) of the command with these findings."""
    monkeypatch.setattr(proof, "prove", lambda *rules, **options: PROVEN._replace(**changes))
    code = cli.main(["verify-lossless", *arguments])
    return code, capsys.readouterr().out


FAILED = ROW._replace(measure=0.2, passed=False, wrong="the policy's check differs for the same row")
VERDICTS = {  # further words of the command, what is found, the exit code
    "no-deviation.txt": ((), {}, 0),
    "not-shown.txt": ((), {"gaps": ("the rule never drafted",), "passes": 3}, 3),
    "not-lossless.txt": ((), {"rows": (FAILED, P_VALUE), "counterexample": WRONG}, 1),
    "not-lossless.json": (("--json",), {"rows": (FAILED,), "counterexample": WRONG}, 1),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_is_the_stored_one(name, capsys, monkeypatch, stored):
    """It says how much was drawn, what would escape, and shows a failed property with its counterexample."""
    monkeypatch.setenv("COLUMNS", "120")
    words, changes, expected = VERDICTS[name]
    code, out = verify(capsys, monkeypatch, *words, **changes)
    assert code == expected
    stored(name, out)


@pytest.mark.seldom
@pytest.mark.optimised
def test_the_proof_runs_on_a_users_own_pair(capsys, models, monkeypatch):
    words = ["--policy", "static", *models, "--prompt", "hello", "--temperature", "0.3", "--pair-sequences", "300"]
    code, out = verify(capsys, monkeypatch, *words, "--json")
    pair = json.loads(out)["pair"]
    assert code == 0 and pair["lossless"] and pair["sequences"] == 300 and pair["degrees"] > 3
    assert pair["tokens"] == 8 == len(pair["by_position"])  # drafts of 7, the length in use
    assert pair["drafted"][-1] > 0


NAN = math.nan


def round_(proposed, accepted, emitted, entropy, threshold=0.7, phase=0, drafter_id=0):
    """What RoundInfo holds of one round; the distributions' largest probabilities follow from the entropies."""
    drafts = np.array([*proposed, *[0] * (4 - len(proposed))], np.int32)
    entropies = np.array([*entropy, *[NAN] * (4 - len(entropy))], np.float32)
    counts = {"drafted": len(proposed), "accepted": accepted, "emitted": emitted, "drafter_id": drafter_id}
    numbers = {name: np.int32(count) for name, count in (counts | {"phase": phase}).items()}
    seen = {"proposed": drafts, "entropy": entropies, "max_prob": np.exp(-entropies)}
    return seen | {"threshold": np.float32(threshold)} | numbers


def generation_of(tokens, rounds, text=None, reason="length"):
    end = len(tokens) - (reason == "stop")
    text = tokenizer().decode(tokens[:end]) if text is None else text
    return Generation(text, tokens, [1], reason, summarise(no_counts(1, 4)), 2.0, 0.1, 0.0, rounds)


def example(then=""):
    """ab accepted, c in place of x (y after it); d alone, in a reasoning phase; half of é, its rest, `then`, an end."""
    a, b, c, d, x, y, one, two = tokens_of("abcdxyé")
    more = tokens_of(then) if then else []
    rounds = [
        round_([a, b, x, y], 2, 3, [0.1, 0.2, 2.5, 1.0]),
        round_([], 0, 1, [3.0], threshold=0.6, phase=1, drafter_id=1),
        round_([one], 1, 2, [0.5, NAN], threshold=NAN),
        *[round_([], 0, 1, [0.4]) for _ in more],
        round_([], 0, 1, []),
    ]
    return generation_of([a, b, c, d, one, two, *more, 2], rounds, reason="stop")


def described(tokens):
    """A line a token: its fields in order."""
    short = lambda value: f"{value:.4f}" if isinstance(value, (float, np.floating)) else repr(value)  # noqa: E731
    rejected = ([[short(field) for field in draft] for draft in token.rejected] for token in tokens)
    lines = [[*map(short, token._replace(rejected=()))] for token in tokens]
    return "".join(f"{' '.join(line)} {drafts}\n" for line, drafts in zip(lines, rejected, strict=True))


def test_every_token_what_was_rejected_before_it_texts_that_end_early_and_branches(stored):
    assert phases_of(tokens_shown(example(), tokenizer())) == [(3, 4)]
    a, b, c, d, x, y = tokens_of("abcdxy")
    ended = generation_of([a, 2], [round_([a, 2, b], 2, 2, [0.1] * 3)], reason="stop")
    rounds = [round_([], 0, 1, [0.5]) for _ in range(4)]
    stopped = generation_of([a, b, c, d], rounds, text="ab", reason="stop_string")
    branch = generation_of([a, b, c], [round_([a, x, y], 1, 3, [0.1, 1.5, 0.7])])
    texts = [described(tokens_shown(each, tokenizer())) for each in (example(), ended, stopped, branch)]
    stored("tokens.txt", "\n".join(texts))
    assert '<span class="token branch"' in page(branch, tokenizer())
    assert '<span class="token branch"' not in page(example(), tokenizer())


def test_a_record_read_back_from_json_gives_the_same_tokens_and_none_is_refused():
    rounds = json.loads(json_text(example().rounds))
    again = tokens_shown(example()._replace(rounds=rounds), tokenizer())
    assert str(again) == str(tokens_shown(example(), tokenizer()))
    with pytest.raises(ValueError, match="record=True"):
        tokens_shown(example()._replace(rounds=None), tokenizer())
    with pytest.raises(ValueError, match="the rounds emitted 7 tokens, the generation has 6"):
        tokens_shown(example()._replace(tokens=example().tokens[:-1]), tokenizer())


@pytest.mark.parametrize("wrong", [(), (2, 5, 6), (0, 1, 2, 3, 4)])
def test_tokens_of_a_decoded_text_are_those_counted(wrong):
    script = tokens_of("one two three äöü")
    pair = scripted_pair(script, wrong_at(script, *wrong))
    result = generate(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, record=True, **OPTIONS)
    tokens, counts = tokens_shown(result, pair.target.tokenizer), result.statistics
    assert "".join(token.text for token in tokens) == result.text
    assert [token.id for token in tokens] == result.tokens
    assert sum(token.kind == "accepted" for token in tokens) == counts["num_accepted_tokens"]
    assert tokens[-1].round + 1 == sum(token.first for token in tokens) == counts["num_rounds"]
    assert sum(len(token.rejected) for token in tokens) <= counts["num_draft_tokens"] - counts["num_accepted_tokens"]
    assert "\ufffd" not in "".join(token.text for token in tokens)


def test_the_bound_is_1_less_a_root_and_never_below_0():
    assert bound(0.0, 0.2) == 1 and bound(1.25, 0.2) == 0.5 and bound(9.0, 0.2) == 0 and math.isnan(bound(NAN, 0.2))


def test_a_page_of_no_record_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "a.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="record=True"):
        save_page(path, example()._replace(rounds=None), tokenizer())
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_pages_of_the_documentation_run(tiny_folders, tmp_path, monkeypatch, capsys):
    """Its two blocks of Python, on a tiny pair."""
    target, drafter = tiny_folders
    monkeypatch.chdir(tmp_path)
    code = "".join(blocks("views.md", "python")).replace("build_pair()", f"build_pair({target!r}, {drafter!r})")
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=10", code)
    code = code.replace("pair=pair,", "pair=pair, chat=False,").replace("width=4", "width=4, chat=False")
    code = code.replace("width=4", f"width=4, target={target!r}")
    exec(compile(code, "docs/views.md", "exec"), {})
    assert (tmp_path / "run.html").is_file()
    assert capsys.readouterr().out.count("length '") == 4


EVIL = "<script>alert(1)</script>&amp;\"'{{ 1 }}"


class Tags(HTMLParser):
    scripts, links = 0, ()

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.links += tuple((name, value) for name, value in attrs if name in ("src", "href", "action", "srcset"))


def test_the_page_links_to_nothing_and_what_a_model_wrote_is_text():
    tags, html = Tags(), page(example(EVIL), tokenizer(), title=EVIL, details={EVIL: EVIL})
    tags.feed(html)
    assert tags.scripts == 2 and tags.links == (("href", "data:,"),)
    assert "alert(1)</script>" not in html and "http" not in html.replace("http-equiv", "")
    assert not CONTROL.search(page(example(DANGER), tokenizer(), title=DANGER, details={DANGER: DANGER}))


@pytest.mark.parametrize(
    ("policy", "unit", "has_bound"),
    [
        *((adaedl(), None, True), (at_least(1, adaedl()), None, True), (max_confidence(), None, False)),
        *((survival(), "tokens per plain pass", False), (phase_length(), "drafts per round", False)),
        *((update_every(svip()), "√(factor H)", False), (None, "the policy's own unit", False)),
    ],
)
def test_a_threshold_is_drawn_among_probabilities_only_if_it_is_one(policy, unit, has_bound):
    """A rate of 0.7 tokens is no chance of 0.7: it has an axis with its unit."""
    html = unescape(page(example(), tokenizer(), policy=policy))
    units = re.findall(r'rotate\(-90\)" text-anchor="middle">(.*?)</text>', html)
    (place,) = re.findall(r'class="limit" d="M0 ([\d.]+)', html)
    assert units == ["nats", "probability", *([unit] if unit else [])]
    assert (f"the policy's threshold in that round, in {unit}" in html) == (float(place) > 256) == (unit is not None)
    assert ("bound 1 " in html) == ("λ, the policy's" in html) == has_bound


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: sh tools/get_chromium.sh")
TEXT = "Array.from(document.querySelectorAll('.token')).map(t => t.textContent).join('')"
DELETED = "Array.from(document.querySelectorAll('del')).map(e => getComputedStyle(e).display).slice(1)"  # no legend
TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"


@pytest.fixture(scope="module")
def chromium():
    """That of the machine (tools/get_chromium.sh), so that playwright downloads none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    return save_page(path, example(EVIL), tokenizer(), title=EVIL, policy=adaedl())


@pytest.fixture
def opened(request, chromium, file):
    """The file, opened with the options of the test, and lists of what it logs and of what it asks for."""
    options = {"viewport": {"width": 1000, "height": 900}} | getattr(request, "param", {})
    with chromium.new_page(**options) as page:
        errors, requests = [], []
        page.on("console", lambda line: errors.append(line) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(error))  # a builtin is no handler to playwright
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.resolve().as_uri())
        yield page, errors, requests


NARROW = {"viewport": {"width": 360, "height": 640}, "is_mobile": True}


@needs_chromium
@pytest.mark.parametrize("opened", [{}, {"color_scheme": "dark"}, NARROW], indirect=True)
def test_in_a_browser_the_page_is_quiet_and_shows_the_text(opened, file):
    page, errors, requests = opened
    assert page.evaluate(TEXT) == example(EVIL).text and page.title() == EVIL
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.locator(".token").first.click()
    assert requests == [file.resolve().as_uri()] and errors == []


@needs_chromium
def test_in_a_browser_a_switch_hides_the_rejected_drafts_and_tokens_tell_their_figures(opened):
    page, *_ = opened
    assert page.evaluate(DELETED) == ["inline"] * 2
    page.click("#show-rejected")
    assert page.evaluate(DELETED) == ["none"] * 2 and page.evaluate(TEXT) == example(EVIL).text
    page.click("#show-rejected")
    assert page.evaluate(DELETED) == ["inline"] * 2
    page.click("#show-rounds")
    assert page.evaluate("getComputedStyle(document.querySelector('#text .tick')).display") == "none"
    assert page.evaluate(TIP) == ""
    page.locator(".token").nth(2).click()
    tip = page.evaluate(TIP).replace("\n", " ")
    for words in ("'c' (", "2.500 nats", "0.082", "0.700", "round1", "rejected herexy"):
        assert words in tip, tip
    marker = "(m => [m.getAttribute('visibility'), Number(m.getAttribute('x'))])(document.querySelector('#marker'))"
    column = page.evaluate("Number(document.querySelector('#chart').dataset.column)")
    assert page.evaluate(marker) == [None, 2 * column]
    assert page.evaluate("document.querySelectorAll('.token')[2].getAttribute('aria-pressed')") == "true"
    page.locator(".token").nth(2).click()
    assert page.evaluate(marker)[0] == "hidden"


@needs_chromium
def test_in_a_browser_arrow_keys_walk_and_enter_chooses(opened):
    page, errors, _ = opened
    page.evaluate("document.querySelector('.token').focus()")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "d"
    tip = page.evaluate(TIP)
    assert "reasoning" in tip and "3.000 nats" in tip
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert page.evaluate("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    page.keyboard.press("Escape")
    assert page.evaluate(TIP) == "" and errors == []


SHORT = ["--max-new-tokens", "12", "--max-draft-length", "2", "--no-chat", "--dtype", "float32"]


@pytest.mark.seldom
def test_phases_are_watched_where_they_are_asked_for(capsys, models, tmp_path):
    """The tiny target is ever uncertain: at the default thresholds it reasons after eight tokens, at its own never."""
    content = {
        name: {"name": name, **fingerprint(load_model(path, dtype="float32").params)}
        for name, path in (("target", models[1]), ("drafter", models[3]))
    }
    learnt = {"policy": {}, "verifier": {}, "monitor": {"phases": {"enter": 50.0, "leave": 50.0}}}
    content |= {"hyperparameters": {"greedy": learnt, "sampled": learnt}, "figures": {}}
    (tmp_path / "calibration.json").write_text(json.dumps(content))

    def reasoning(*more):
        page = tmp_path / "a.html"
        assert cli.main(["generate", "hello", *models, *SHORT, "--json", "--page", str(page), *more]) == 0
        result = json.loads(capsys.readouterr().out)
        shaded = page.read_text(encoding="utf-8").count(' reasoning"')
        return result["statistics"]["num_reasoning_tokens"], shaded, result["tokens"]

    unwatched, watched = reasoning(), reasoning("--phases")
    calibrated = reasoning("--phases", "--calibration", str(tmp_path / "calibration.json"))
    assert watched[0] == 4 and watched[1] > 0
    assert unwatched[:2] == calibrated[:2] == (0, 0)
    assert unwatched[2] == watched[2] == calibrated[2]
