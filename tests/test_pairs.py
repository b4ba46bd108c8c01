"""Drafters as people name them, on the built-in models: several that take turns, and what they cost."""

import numpy as np
import pytest

from specdec_jax.calibrated import calibration_of, numbers_for
from specdec_jax.generation import build_pair, generate
from specdec_jax.pairs import _relative_size
from specdec_jax.stopping import static

TEXT = "The ferry leaves at six. Bicycles travel free of charge before eight in the morning."
PROMPT = f'Repeat this word for word, twice: "{TEXT}"'


def test_several_real_drafters_take_turns_and_write_what_the_target_writes(smollm2_float32, smollm2_drafter_float32):
    plain = generate(PROMPT, target=smollm2_float32, drafter=None, max_new_tokens=40)
    drafters = (smollm2_drafter_float32, "prompt_lookup")
    pair = build_pair(smollm2_float32, drafters, policy=static(), verification_widths=(8,))
    result = generate(PROMPT, pair=pair, max_new_tokens=40, policy_numbers={"draft_length": 4}, record=True)
    assert result.tokens == plain.tokens
    chosen = np.array([record["drafter_id"] for record in result.rounds])
    drafted = np.array([record["drafted"] for record in result.rounds])
    assert set(chosen[drafted > 0].tolist()) == {0, 1}
    passes = np.array([record["drafter_passes"] for record in result.rounds])
    assert np.all(passes[chosen == 1] == 0), "a lookup costs no pass"
    assert result.statistics["num_accepted_tokens"] > 5


def test_parameters_of_several_drafters_are_as_many(smollm2):
    with pytest.raises(ValueError, match="drafter_params for 2 drafters must be a sequence of as many"):
        build_pair(smollm2, ("ngram", "prompt_lookup"), drafter_params=[None])


def test_a_drafters_cost_is_its_share_of_the_targets_weights(smollm2, smollm2_drafter):
    assert 0.09 < _relative_size(smollm2_drafter.params, smollm2.params) < 0.11
    assert _relative_size(None, smollm2.params) == 0


def test_the_built_in_pair_finds_its_calibration(smollm2, smollm2_drafter):
    pair = build_pair(smollm2, smollm2_drafter, policy=static())
    found = calibration_of("built-in", pair)
    assert (found.target["name"], found.drafter["name"]) == ("smollm2", "smollm2-drafter")
    assert numbers_for(found, "policy", pair.decoder.parts.policy, 0.0) == {"draft_length": 3}
    together = build_pair(smollm2, (smollm2_drafter, "prompt_lookup"), policy=static())
    assert calibration_of("built-in", together).source == found.source
