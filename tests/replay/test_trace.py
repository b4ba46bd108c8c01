"""Trace files: what is written is read, and what is torn or inconsistent is refused by name."""

import json

import numpy as np
import pytest

from specdec_jax.costs.cost_model import between, cost_model, load_cost_model, save_cost_model
from specdec_jax.lossless.toys import table_model
from specdec_jax.replay.trace import FEATURES, Trace, check, join, load_trace, save_trace, select
from specdec_jax.replay.tracing import trace_texts

TEXTS, LIMIT, MOST = 3, 5, 4


def some_trace(seed=0):
    rng = np.random.default_rng(seed)
    length = np.array([5, 3, 1], np.int32)
    accepted = rng.random((TEXTS, LIMIT + 1)) < 0.5
    accepted &= np.arange(LIMIT + 1) < length[:, None]
    within = np.arange(LIMIT + 1) <= length[:, None]
    rejected = within & ~accepted
    tail_of = np.zeros(accepted.shape, np.int32)
    tail_of[rejected] = np.arange(rejected.sum())
    shape = (TEXTS, LIMIT + 1)
    return Trace(
        path=rng.random((*shape, len(FEATURES)), np.float32),
        accepted=accepted,
        tail_of=tail_of,
        tails=rng.random((rejected.sum(), MOST, len(FEATURES)), np.float32),
        length=length,
        limit=np.full(TEXTS, LIMIT, np.int32),
        prompt_length=np.arange(1, TEXTS + 1, dtype=np.int32),
        seed=np.arange(TEXTS, dtype=np.uint32),
        temperature=np.full(TEXTS, 0.7, np.float32),
        tokens=rng.integers(0, 9, (TEXTS, LIMIT), np.int32),
        overlap=rng.random(shape, np.float32),
        cross_entropy=rng.random(shape, np.float32),
        target_entropy=rng.random(shape, np.float32),
        raw_target_entropy=rng.random(shape, np.float32),
        about={"target": "a", "ids": ["x", "y", "z"], "tasks": ["m", "n", "m"]},
        chains=rng.random((*shape, MOST, len(FEATURES)), np.float32),
        run=accepted * rng.integers(1, MOST, shape),
        candidate=rng.integers(0, 4, shape, np.int8),
        prompt_hash=np.zeros(TEXTS, np.uint32),
    )


def test_a_trace_is_read_as_it_was_written_with_the_truncations_of_its_warp(tmp_path):
    trace = some_trace()
    save_trace(tmp_path / "t.npz", trace)
    read = load_trace(tmp_path / "t.npz")
    for name, value in trace._replace(about=None)._asdict().items():
        np.testing.assert_array_equal(value, getattr(read._replace(about=None), name))
    assert trace.about == read.about
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.npz"]
    assert trace.num_positions == 9 and trace.max_draft_length == MOST
    save_trace(tmp_path / "t.npz", trace._replace(about=trace.about | {"warp": {"temperature": 0.7, "top_p": 0.8}}))
    np.testing.assert_allclose(load_trace(tmp_path / "t.npz").truncation, [[0.0, 0.8, 0.0]] * TEXTS)
    save_trace(tmp_path / "t.npz", trace)
    loaded = load_trace(tmp_path / "t.npz")
    assert loaded.truncation is None and loaded.prompt_hash.tolist() == [0] * TEXTS


def test_joining_what_was_selected_gives_the_whole():
    trace = some_trace()
    whole = join([select(trace, [index]) for index in range(TEXTS)])
    for text in range(TEXTS):
        for at in range(int(trace.length[text]) + 1):
            if not trace.accepted[text, at]:
                mine, its = (one.tails[one.tail_of[text, at]] for one in (whole, trace))
                np.testing.assert_array_equal(mine, its)
    for name in ("chains", "run", "candidate"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(trace, name))
    assert whole.about == trace.about and check(whole) == ""
    assert select(trace, [2, 0]).about["tasks"] == ["m", "m"]
    with pytest.raises(ValueError, match="at least one text"):
        select(trace, [])
    with pytest.raises(ValueError, match="one tail length"):
        join([trace, trace._replace(tails=trace.tails[:, :2])])
    with pytest.raises(ValueError, match="the same fields can be joined"):
        join([trace, trace._replace(candidate=None)])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t._replace(length=t.length + 3), "longer than its limit"),
        (lambda t: t._replace(accepted=np.ones_like(t.accepted)), "beyond the end"),
        (lambda t: t._replace(accepted=np.arange(LIMIT + 1) == t.length[:, None]), "beyond the end"),  # just beyond it
        (lambda t: t._replace(tail_of=t.tail_of + 100), "no tail"),
        (lambda t: t._replace(path=t.path[:, :-1]), "path has shape"),
        (lambda t: t._replace(raw_target_entropy=t.raw_target_entropy * np.nan), "raw entropy of the target"),
        (lambda t: t._replace(tails=np.full_like(t.tails, np.nan)), "not a number"),
        (lambda t: t._replace(tails=t.tails[..., :2]), "tails has shape"),
        (lambda t: t._replace(cross_entropy=t.cross_entropy[:, 1:]), "cross_entropy has shape"),
        (lambda t: t._replace(candidate=t.candidate[:, 1:]), "candidate has shape"),
        (lambda t: t._replace(run=None), "one of chains and run without the other"),
        (lambda t: t._replace(length=t.length.astype(np.float32)), "length holds float32"),
        (lambda t: t._replace(tokens=-t.tokens - 1), "a token is negative"),
        (lambda t: t._replace(temperature=t.temperature * np.nan), "a temperature is negative or not a number"),
        (lambda t: t._replace(about=None), "about must be an object, got None"),
        (lambda t: t._replace(about={"tasks": ["m"]}), "about has tasks .'m'. for 3 texts"),
        (lambda t: t._replace(about={"ids": "xyz"}), "about has ids 'xyz'"),
        (lambda t: t._replace(about={"warp": 0.7}), "a warp that is no object: 0.7"),
    ],
)
def test_an_inconsistent_trace_is_refused(tmp_path, change, words):
    save_trace(tmp_path / "t.npz", change(some_trace()))
    with pytest.raises(ValueError, match=f"t.npz.*{words}"):
        load_trace(tmp_path / "t.npz")


def test_what_is_no_trace_is_named(tmp_path):
    path = tmp_path / "t.npz"
    with pytest.raises(FileNotFoundError, match=r"t\.npz.*experiments\.record"):
        load_trace(path)
    save_trace(path, some_trace())
    whole = path.read_bytes()
    np.save(tmp_path / "array.npy", np.ones(3))
    damaged = whole[:200] + bytes(40) + whole[240:]
    for content in (b"", b"no archive", whole[: len(whole) // 2], damaged, (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.npz"):
            load_trace(path)
    arrays = {name: value for name, value in some_trace()._asdict().items() if name != "about" and value is not None}
    about = {"features": FEATURES, "about": {}}
    np.savez(path, manifest=np.array(json.dumps(about | {"format": 99})), **arrays)
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        load_trace(path)
    np.savez(path, manifest=np.array(json.dumps({"format": 1, "features": ["entropy"], "about": {}})), **arrays)
    with pytest.raises(ValueError, match=r"has the features \['entropy'\], a trace has"):
        load_trace(path)
    arrays.pop("seed")
    np.savez(path, manifest=np.array(json.dumps(about | {"format": 1})), **arrays)
    with pytest.raises(ValueError, match="lacks seed"):
        load_trace(path)


@pytest.mark.parametrize(
    "texts, options, words",
    [
        ([], {}, "at least one text"),
        ([([1], [])], {}, "0 of answer"),
        ([([1], [1, 2, 3])], {"limit": 2}, "3 tokens, over the limit of 2"),
        ([([1], [1])], {"max_draft_length": 0}, "max_draft_length.*0"),
        ([([1] * 5000, [1])], {}, "5001.*4096"),
    ],
)
def test_texts_that_cannot_be_traced_are_named(texts, options, words):
    toy = table_model(4)
    with pytest.raises(ValueError, match=words):
        trace_texts((toy, toy), (None, None), texts, **({"limit": 9} | options))


def test_a_cost_model_is_read_as_it_was_written(tmp_path):
    costs = cost_model(0.1, {1: 1.0, 4: 1.1, 8: 1.3}, plain_pass=0.9, device="cpu", batch=2)
    save_cost_model(tmp_path / "c.json", costs)
    assert load_cost_model(tmp_path / "c.json") == costs and abs(costs.ratio - 0.1 / 0.9) < 1e-12
    finer = between(costs, [1, 2, 6, 8])
    np.testing.assert_allclose(finer.target_pass, [1.0, 1.0 + 0.1 / 3, 1.2, 1.3])
    with pytest.raises(FileNotFoundError, match="step_cost"):
        load_cost_model(tmp_path / "d.json")
    for step, times, words in ((-0.1, {1: 1.0}, "drafter_step"), (0.1, {1: 0.0}, "target_pass"), (0.1, {}, "widths")):
        with pytest.raises(ValueError, match=words):
            cost_model(step, times)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, "lacks 'drafter_step'"),
        ({"drafter_step": "0.1"}, "drafter_step must be a number, got '0.1'"),
        ({"plain_pass": float("inf")}, r"plain_pass must lie in \(0, inf\), got inf"),
        ({"target_pass": [1.0, float("nan")]}, r"target_pass must lie in \(0, inf\), got \[1.0, nan\]"),
        ({"target_pass": [1.0, 0.0]}, "target_pass must lie in"),
        ({"target_pass": [1.0]}, "argument 2 is shorter"),
        ({"widths": [1, "4"]}, r"widths must be a whole number, got \[1, '4'\]"),
        ({"batch": 1.5}, "batch must be a whole number, got 1.5"),
        ({"slots": "many"}, "slots must be a whole number, got 'many'"),
        ({"slot_time": float("inf")}, r"slot_time must lie in \[0, inf\), got inf"),
    ],
)
def test_a_file_that_is_no_cost_model_is_named(tmp_path, changes, words):
    whole = cost_model(0.1, {1: 1.0, 4: 1.1})._asdict()
    (tmp_path / "c.json").write_text(json.dumps({} if changes is None else whole | changes))
    with pytest.raises(ValueError, match=rf"c\.json is not a cost model: .*{words}"):
        load_cost_model(tmp_path / "c.json")
