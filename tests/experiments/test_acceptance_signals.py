"""What foretells acceptance is found, held out, and what does not gains nothing; positions are those of rounds."""

import ml_dtypes
import numpy as np
import pytest
from tiny_llama import CONFIG, model_and_params

from experiments import acceptance_signals as study
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.writing import BY_ASSISTANT, GIVEN
from specdec_jax.loading import LoadedModel

pytestmark = pytest.mark.slow


def made_up(of, positions=4000, seed=0):
    """Acceptance by a column of the drafter's distribution, or by a direction of the second layer's hidden state."""
    rng = np.random.default_rng(seed)
    own, hidden = rng.normal(size=(positions, 3)), rng.normal(size=(positions, 2, 16))
    logit = 2.0 * (own[:, 0] if of == "own" else hidden[:, 1] @ np.eye(16)[3])
    conversation = np.repeat(np.arange(positions // 20), 20)
    accepted = (1 / (1 + np.exp(-logit))).astype(np.float32)
    return study.Positions(own, hidden, accepted, conversation, conversation % 5)


def test_the_signal_that_tells_is_found_and_others_gain_nothing():
    by_name = {guess.signal: guess for guess in study.guesses(made_up("hidden", 12_000), [4, 9], 4, 0, 300)}
    assert by_name["the target's layer 9"].gain.low > 0.1 and abs(by_name["the target's layer 4"].gain.estimate) < 0.02
    assert by_name["the drafter's distribution"].gain is None
    assert by_name["the drafter and all layers"].gain.low > 0.1
    by_name = {guess.signal: guess for guess in study.guesses(made_up("own"), [4, 9], 4, 0, 300)}
    assert by_name["the target's layer 9"].gain.high < -0.1
    assert abs(by_name["the drafter and layer 9"].gain.estimate) < 0.02  # what cannot help does not seem to


def test_a_network_finds_what_no_regression_does():
    seen = made_up("own")
    accepted = np.where(np.abs(seen.own[:, 0]) > 0.7, 0.95, 0.05).astype(np.float32)
    losses = [
        study._held_out(seen.own, seen.own[:, :0], seen._replace(accepted=accepted), 2, units, 400).mean()
        for units in (0, 16)
    ]
    assert losses[0] > 0.6 and losses[1] < 0.4


def shard_of(kinds=("a", "b")):
    rng = np.random.default_rng(0)
    sizes, tokens = [9, 12, 2, 30], rng.integers(3, CONFIG.vocab_size, 53)
    offsets = np.cumsum([0, *sizes])
    writer = np.full(53, GIVEN, np.uint8)
    for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
        writer[start + 4 : stop] = BY_ASSISTANT
    hidden = (np.arange(53)[:, None, None] * np.ones((1, 1, 4)) + 1.0).astype(ml_dtypes.bfloat16)
    hidden[..., 3] = 100.0
    top = np.stack([tokens] * 4, axis=1).astype(np.uint16) + np.arange(4, dtype=np.uint16)[None]
    log_prob = np.log(np.full((53, 4), 0.24)).astype(np.float16)
    return Shard(
        tokens.astype(np.uint16), writer, offsets, np.array([0, 1, 0, 1], np.uint8), np.ones(4, np.float32),
        top % CONFIG.vocab_size, log_prob, kinds, hidden,
    )  # fmt: skip


def test_positions_have_the_state_of_the_token_before_the_last(monkeypatch):
    model, params = model_and_params()
    monkeypatch.setattr(study, "ROW", 32)
    drafter = LoadedModel(model, params, None, "tiny", CONFIG)
    shard = shard_of()
    seen = study.gather(drafter, [shard], 0.7, 1000)
    # Answers of 5, 8 and 26 tokens; the conversation of two has none.
    assert np.bincount(seen.conversation).tolist() == [5, 8, 0, 26] and len(np.unique(seen.kind)) == 2
    state = seen.hidden[:, 0, 0] / seen.hidden[:, 0, 3] * 100.0 - 1.0  # which token's it is
    first = [3 - 1, 9 + 3 - 1, 23 + 3 - 1]  # the answer begins at the fifth token; the fourth is the round's last
    found = [state[seen.conversation == index][0] for index in (0, 1, 3)]
    np.testing.assert_allclose(found, first, atol=0.3)
    assert ((seen.accepted > 0) & (seen.accepted < 1)).all()


def test_data_without_hidden_states_is_refused(tmp_path, capsys):
    ShardFolder(tmp_path).add("00000", shard_of()._replace(hidden=np.zeros((53, 0, 0), ml_dtypes.bfloat16)))
    assert study.main(["--data", str(tmp_path)]) == 2
    assert "holds no hidden states of one set of layers" in capsys.readouterr().err
    assert study.main(["--data", str(tmp_path / "nowhere")]) == 2
    assert "no folder of token shards" in capsys.readouterr().err
