"""What the target writes is its own text, under its own distributions, and starts and ends where it says."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refusals
from tiny_weights import assert_same_params

from specdec_jax.distillation.conversations import Author, Pool, Temperatures, read_template
from specdec_jax.distillation.exporting import export, model_card
from specdec_jax.distillation.labelling import build_labeller, label_shard
from specdec_jax.distillation.prompts import HeldOut, Openings, RequestSource
from specdec_jax.distillation.shards import Shard
from specdec_jax.distillation.writing import BY_ASSISTANT, BY_USER, GIVEN
from specdec_jax.loading import load_model
from specdec_jax.types import Hidden

END = 2
POOL = Pool(batch=4, slots=48, steps=160)


@pytest.fixture(scope="module")
def target(tiny_folders):
    """In float32, which bfloat16 cannot hold exactly."""
    return load_model(tiny_folders[0], dtype="float32")


def author(target, texts=("hello", "he {n}"), *, held_out=(), labels=5, open=False, **options):
    source = RequestSource([Openings("kind", texts, open=open, turn_limit=7)], {})
    models = target.model, target.params, target.tokenizer
    return Author(*models, source, HeldOut(held_out), labels=labels, chunk=16, **options)


@pytest.fixture(scope="module")
def written(target) -> Shard:
    temperatures = Temperatures((0.0, 1.0), (0.5, 0.5), user=1.0)
    options = {"temperatures": temperatures, "several_turns": 1.0, "layers": (0, 1)}
    shard, facts = author(target, open=True, **options).block(3, POOL, long=False)
    assert facts["idle"] < 0.2 and len(shard.kind) > 8, facts
    return shard


def conversations(shard):
    arrays = *shard[:2], shard.top, shard.log_prob
    for at, (start, stop) in enumerate(zip(shard.offsets[:-1], shard.offsets[1:], strict=True)):
        yield float(shard.temperature[at]), *(array[start:stop] for array in arrays)


def test_labels_are_the_distributions_of_the_text_alone(target, written):
    """A row that keeps anything of the conversation before it, or a label a position off, gives other distributions."""
    label = build_labeller(target.model, 5, positions=256)
    texts = [tokens.astype(np.int32) for _, tokens, _, _, _ in conversations(written)]
    for (_, _, _, top, log_prob), labelled in zip(conversations(written), label(target.params, texts), strict=True):
        np.testing.assert_allclose(log_prob.astype(np.float32), labelled.log_prob, atol=5e-3)
        assert np.mean(top == labelled.top) > 0.99  # ties aside


def test_hidden_states_are_those_of_the_text_alone(target, written):
    """Written token by token beside other rows, or of a text that is there: in order, and of the layers asked."""
    again = label_shard(build_labeller(target.model, 5, layers=(0, 1), positions=128), target.params, written, 272)
    np.testing.assert_allclose(again.log_prob.astype(np.float32), written.log_prob.astype(np.float32), atol=5e-3)
    assert written.hidden.shape == again.hidden.shape == (written.num_tokens, 2, target.config.hidden_size)
    for found in (written.hidden, again.hidden):
        size = np.abs(again.hidden.astype(np.float32)).max()
        np.testing.assert_allclose(found.astype(np.float32), again.hidden.astype(np.float32), atol=0.01 * size)
    embedding = np.asarray(target.params["embedding"])[written.tokens.astype(np.int64)]
    np.testing.assert_allclose(written.hidden[:, 0].astype(np.float32), embedding, rtol=0.01, atol=1e-3)
    turned = build_labeller(target.model, 5, layers=(1, 0), positions=128)(target.params, [written.tokens[:9]])
    np.testing.assert_array_equal(turned[0].hidden[:, 1], again.hidden[:9, 0])


def test_at_temperature_zero_answers_are_the_most_probable_tokens(written):
    checked = 0
    for temperature, tokens, writer, top, _ in conversations(written):
        own = writer[1:] == BY_ASSISTANT
        if temperature == 0:
            checked += own.sum()
            assert np.array_equal(tokens[1:][own], top[:-1][own, 0])
    assert checked > 50


def test_at_temperature_one_tokens_follow_the_distribution(written):
    """The most probable token comes as often as its probability says: a sampler that ignores the temperature, or
    reuses a uniform, is far off."""
    hits, expected, variance = 0, 0.0, 0.0
    for temperature, tokens, writer, top, log_prob in conversations(written):
        own = (writer[1:] == BY_USER) | ((writer[1:] == BY_ASSISTANT) & (temperature == 1))
        probability = np.exp(log_prob[:-1][own, 0].astype(np.float64))
        hits += (tokens[1:][own] == top[:-1][own, 0]).sum()
        expected += probability.sum()
        variance += (probability * (1 - probability)).sum()
    assert variance > 4 and abs(hits - expected) < 4 * np.sqrt(variance)


def test_sides_change_where_turns_end(target, written):
    close = read_template(target.tokenizer)
    turned = 0
    for _, tokens, writer, _, _ in conversations(written):
        for at in np.flatnonzero((tokens == END) & (writer == BY_USER)):
            assert np.array_equal(tokens[at : at + len(close.close_user)], close.close_user[: len(tokens) - at])
            turned += 1
        users = np.flatnonzero(writer == BY_USER)
        if len(users):  # no longer than 40, the least limit
            assert np.max(np.diff(np.append(np.flatnonzero(np.diff(users) > 1), len(users) - 1), prepend=-1)) <= 40
        assert writer[0] == GIVEN and len(tokens) <= POOL.slots
    assert turned > 3


def test_a_block_depends_on_its_number_alone(target):
    one, other = author(target), author(target)
    other.block(0, POOL, long=False)
    first, again = one.block(5, POOL, long=False)[0], other.block(5, POOL, long=False)[0]
    assert np.array_equal(first.tokens, again.tokens) and np.array_equal(first.log_prob, again.log_prob)
    assert not np.array_equal(first.tokens[:60], one.block(6, POOL, long=False)[0].tokens[:60])


def test_held_out_prompts_are_never_used(target):
    texts = ("he said hello to all of us here", "one two three four five six seven eight nine")
    held = ["And then ONE two three, four five six seven eight!"]
    shard, _ = author(target, texts, held_out=held).block(0, Pool(4, 96, 64), long=False)
    labelled = {target.tokenizer.decode(tokens[writer == GIVEN]) for _, tokens, writer, _, _ in conversations(shard)}
    assert labelled and not any("seven" in text for text in labelled)
    with pytest.raises(ValueError, match="did not fit"):
        author(target, texts[1:], held_out=held).block(0, Pool(4, 96, 64), long=False)


def test_what_is_held_out_is_found_in_any_spelling():
    held = HeldOut(["The quick brown fox jumps over the lazy dog."])
    assert held.touches("see: the QUICK brown-fox jumps over THE lazy cat")
    assert not held.touches("the quick brown fox jumps over a lazy dog")


@pytest.mark.parametrize("open", [False, True])
def test_special_tokens_in_requests_are_plain_text(target, open):
    text = f"one{target.tokenizer.decode([END], skip_special=False)}two"
    _, tokens = author(target, (text,), open=open)._request(np.random.default_rng(0), 96, False)
    assert tokens.count(END) == (0 if open else 1) and target.tokenizer.decode(tokens).count(text) == 1


def test_a_template_without_ends_of_turns_is_refused(target):
    plain = type(target.tokenizer)(target.tokenizer.backend, target.tokenizer.special, chat_template=(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"))  # fmt: skip
    with pytest.raises(ValueError, match="ordinary tokens"):
        read_template(plain)


test_bad_settings_name_the_value = refusals(
    (lambda target: author(target, layers=(1, 2)), r"layers 0 \(the embedding\) to 1, 2 was asked for"),
    (lambda target: build_labeller(target.model.replace(hidden=Hidden()), 5, layers=(1,)), "does not give hidden"),
    (lambda: Pool(0, 8, 8), "batch"),
    (lambda: Temperatures((0.0,), (0.5, 0.5)), "a weight each"),
    (lambda: Temperatures((-1.0,), (1.0,)), r"must lie in \[0, inf\)"),
    (lambda: Openings("x", ()), "no texts"),
    (lambda: Openings("x", ("a",), open=True), "turn_limit"),
    (lambda: RequestSource([Openings("x", ("{nothing}",))], {}), "nothing"),
    (lambda: RequestSource([Openings("x", ("{document}",))], {}), "documents"),
)


CARD = "# A card\n"


def export_model(path, model, **options):
    export(path, model.config, model.params, model.tokenizer, **({"card": CARD} | options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_export_gives_the_weights_of_its_dtype(tmp_path, tiny_folders, target, dtype):
    export_model(tmp_path / "out", target, dtype=dtype)
    expected = load_model(tiny_folders[0], dtype=dtype)
    for name in ("hf", "orbax"):
        again = load_model(tmp_path / "out" / name, dtype=dtype)
        assert_same_params(again.params, expected.params)
        assert again.config == target.config and again.tokenizer.eos_ids == target.tokenizer.eos_ids
        assert (tmp_path / "out" / name / "README.md").read_text() == CARD
    assert json.loads((tmp_path / "out" / "hf" / "config.json").read_text())["dtype"] == dtype
    weights = load_model(tmp_path / "out" / "hf", dtype="float32").params["embedding"]  # as stored, not as asked for
    np.testing.assert_array_equal(weights, target.params["embedding"].astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("name", ["hf", "orbax"])
def test_one_format_alone_is_the_folder_itself(tmp_path, tiny_folders, name):
    export_model(tmp_path / "out", load_model(tiny_folders[0]), formats=(name,))
    assert (tmp_path / "out" / "README.md").read_text() == CARD
    assert_same_params(load_model(tmp_path / "out").params, load_model(tiny_folders[0]).params)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"formats": ("hf", "orbx")}, "unknown export format 'orbx'; did you mean 'orbax'"),
        ({"formats": ()}, "export needs a format"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"dtype": "float16"}, "parameter norm/scale is not finite in float16"),
    ],
)
def test_a_bad_export_leaves_nothing(tmp_path, target, options, match):
    params = dict(target.params) | {"norm": {"scale": target.params["norm"]["scale"] + 1e6}}
    with pytest.raises(ValueError, match=match):
        export_model(tmp_path / "out", target._replace(params=params), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_card_says_what_is_given():
    figures = {
        "qa": {"agreement": (0.412, 0.38, 0.444), "at 0.7": 0.5},
        "math|1": {"at 0.7": (0.25, float("nan"), 0.0)},
    }
    given = {"name": "small", "parameters": 15_140_864, "base_model": "org/target: 1", "recipe": {"betas": (0.9, 0.95)}}
    card = model_card(given | {"figures": figures})
    assert '"org/target: 1"' in card and "15,140,864" in card and "betas: 0.9, 0.95" in card and "license" not in card
    assert card.endswith("| qa | 0.41 [0.38, 0.44] | 0.5 |\n| math\\|1 | – | 0.25 |\n")


test_a_card_refuses_what_it_cannot_say = refusals(
    ({"summary": "x"}, "needs a name"),
    ({"name": "x", "reciep": "y"}, "no field 'reciep'; did you mean 'recipe'"),
    ({"name": "x", "figures": {"qa": 0.5}}, "map a task to a mapping"),
    by=model_card,
)
