"""The ranking that draft vocabularies are read from: counts of answers, then of anything."""

import json

import numpy as np
import pytest

from experiments.lib.token_ranking import main, rank
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.writing import BY_ASSISTANT, GIVEN
from specdec_jax.loading import load_model
from specdec_jax.loading.draft_vocabulary import RANKING

pytestmark = pytest.mark.slow


def shard(tokens, writers):
    tokens = np.array(tokens, np.uint16)
    ends, none = np.array([0, len(tokens)]), np.zeros((len(tokens), 0))
    return Shard(
        tokens, np.array(writers, np.uint8), ends, np.zeros(1, np.uint8), np.zeros(1, np.float32),
        none.astype(np.uint16), none.astype(np.float16), ("chat",),
    )  # fmt: skip


def test_answers_count_first_and_other_tokens_break_ties(tmp_path, capsys):
    folder = ShardFolder(tmp_path / "data", {})
    folder.add("0", shard([7, 7, 7, 2, 5, 5, 9], [GIVEN] * 3 + [BY_ASSISTANT] * 4))
    folder.add("1", shard([9, 2, 4], [BY_ASSISTANT, GIVEN, GIVEN]))
    assert main(["--data", str(tmp_path / "data"), "--out", str(tmp_path / "drafter")]) == 0
    # answers: 5 and 9 twice, 2 once; anywhere: 7 three times, 2, 5, 9 twice, 4 once
    np.testing.assert_array_equal(np.load(tmp_path / "drafter" / RANKING), [5, 9, 2, 7, 4])
    assert "5 tokens cover 100.0%" in capsys.readouterr().out
    assert main(["--data", str(tmp_path / "data"), "--out", str(tmp_path), "--most", "2"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / RANKING), [5, 9])


def test_texts_of_a_file(tmp_path):
    texts = tmp_path / "mine.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in ("to be or not to be", " to")))
    assert main(["--texts", str(texts), "--out", str(tmp_path)]) == 0
    tokenizer = load_model("smollm2").tokenizer
    ids = [i for text in ("to be or not to be", " to") for i in [*tokenizer.encode(text), *tokenizer.eos_ids]]
    assert len(tokenizer.eos_ids) == 1, "the end of an answer can be proposed"
    counts = sorted((-ids.count(i), i) for i in set(ids))
    np.testing.assert_array_equal(np.load(tmp_path / RANKING), [i for _, i in counts])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --data or --texts"),
        (["--data", "x", "--texts", "y"], "give either --data or --texts"),
        (["--data", "nowhere"], "no folder of token shards at nowhere"),
        (["--texts", "nowhere.jsonl"], "no such file of texts: nowhere.jsonl"),
        (["--texts", "bad.jsonl"], "bad.jsonl:1: "),
        (["--texts", "empty.jsonl"], "there are no tokens to count"),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"words": 3}\n')
    (tmp_path / "empty.jsonl").write_text("")
    assert main([*arguments, "--out", "made"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_large_vocabularies_keep_their_ids():
    counts = np.zeros((70_000, 2), np.int64)
    counts[69_999] = 3
    assert rank(counts).tolist() == [69_999]
