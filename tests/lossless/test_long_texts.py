"""What short samples and chains do not show: late cheats, rows that look at each other, siblings of late drafts."""

from pathlib import Path

import numpy as np
import pytest

from specdec_jax import lossless
from specdec_jax.app import cli
from specdec_jax.app.views import proof
from specdec_jax.contrib.trees import comb, traversal
from specdec_jax.contrib.trees.proof import prove_comb_rounds
from specdec_jax.decoding.sampling import policy_uniforms
from specdec_jax.lossless import (
    Coverage,
    LongTextsReport,
    LosslessReport,
    RoundsCase,
    RoundsReport,
    SampledReport,
    long_texts,
)
from specdec_jax.stopping import static
from specdec_jax.verification import rejection

pytestmark = pytest.mark.slow

CHEATS = Path(__file__).parents[1] / "cheats"
COVERED = Coverage(*map(np.array, ([9, 8], [1, 1], [1, 1, 6], [2, 2, 3])))
ROUNDS = RoundsReport(0.0, True, (RoundsCase({"temperature": 1.0}, 0.0, 7, COVERED),))
TEXTS = LongTextsReport((0.5, 0.5), 256, 64, 20, True, True)
SAMPLED = SampledReport(3.0, 4, 0.5, 100, 4, 5, True, (0.5, 0.5), (90, 20), 7, (1, 2, 3))
EXACT = LosslessReport(0.0, True, (0, 2), ())
HONEST = {  # stands in for what `verify-lossless` proves besides
    "prove_exactly": EXACT,
    "prove_long_drafts": ROUNDS,
    **dict.fromkeys(("prove_together", "prove_verifier", "prove_real_size")),
    "prove_long_texts": TEXTS,
    "_sampled_on_toy": SAMPLED,
}
REFUSED = {  # (what fails, of the report's lines)
    "seed_by_table": ("policy", "by stretch p ="),
    "learns_seed": ("policy", "by stretch p ="),
    "neighbours_beside": ("policy", "depend on its neighbours"),
    "late_neighbour": ("policy", "depend on its neighbours"),
    "deep_siblings": ("verifier", "rounds of 4 drafts with up to 3 siblings"),
    "third_sibling": ("verifier", "rounds of 4 drafts with up to 3 siblings"),
}


def run(monkeypatch, capsys, *arguments, but=""):
    for name, report in HONEST.items():
        if name != but:
            monkeypatch.setattr(proof, name, lambda *asked, report=report, **options: report)
    code = cli.main(["verify-lossless", *arguments])
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.often(1)
@pytest.mark.parametrize("name", REFUSED)
def test_cheats_are_refused(name, monkeypatch, capsys):
    kind, line = REFUSED[name]
    in_use, at_known_keys = [], long_texts._at_known_keys

    def both(*asked):
        in_use.append(at_known_keys(*asked, guessed=False)[0])
        return at_known_keys(*asked)

    monkeypatch.setattr(long_texts, "_at_known_keys", both)
    but = "prove_long_texts" if kind == "policy" else ""  # of the verifiers chains are honest
    code, out = run(monkeypatch, capsys, f"--{kind}", str(CHEATS / f"{name}.py"), but=but)
    assert code == 1 and line in out
    assert len(in_use) == (kind == "policy")
    assert all(min(p_values) > 1e-3 for p_values in in_use)  # with the prompt's hash in the key no rule knows the seed


def test_honest_rules_pass(monkeypatch, capsys):
    code, out = run(monkeypatch, capsys, "--verifier", "traversal", "--policy", "static(draft_length=4)")
    assert code == 0 and "rounds of 4 drafts" in out and "depend on its neighbours" not in out


def by_chance(state, distribution, drafted, context):
    return policy_uniforms(context, 1)[:, 0] < 0.7, state


@pytest.mark.often(1)
@pytest.mark.parametrize("policy", [static().replace(check=by_chance), comb(links=2, siblings=(2, 2), most=2)])
def test_honest_policies_with_chance_or_siblings_pass(policy):
    report = lossless.prove_long_texts(policy, rejection(), max_draft_length=2, tokens=64)
    assert report.lossless and report.alone and report.least > 1e-3 and report.rounds > 20


def test_siblings_that_are_never_accepted_are_named():
    combs = prove_comb_rounds(traversal(), drafts=2, warps=({"temperature": 0.7},))
    assert combs.lossless and not combs.never_accepted
    never = combs._replace(accepted=(0.5, 0.0))
    found = proof.Proof(EXACT, ROUNDS, ROUNDS, SAMPLED, SAMPLED, texts=TEXTS, trees=never)
    assert found.conclusion == proof.NOT_SHOWN and found.gaps == ("no sibling of draft 2 was accepted",)
