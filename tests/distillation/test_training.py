"""Batches, the chunked loss, initialisations and the loop: each against something simpler that must agree."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusals import refusals
from scipy.special import softmax

from specdec_jax.distillation import initial, loop, training
from specdec_jax.distillation.batches import GAP, BatchOrder, Corpus, Packing
from specdec_jax.distillation.head import Labels, build_head_loss
from specdec_jax.distillation.labelling import build_labeller, label_shard
from specdec_jax.distillation.losses import coarse_distributions, forward_kl, lk_hybrid, nla
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.unrolled import Texts, Unroll, unrolled
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.loading import families
from specdec_jax.models import gpt2, gpt_neox, llama, mistral, phi3, qwen3

VOCAB, K = 61, 4
TARGET = llama.LlamaConfig(VOCAB, 96, 64, 2, 4, 2, 16, tie_word_embeddings=True, eos_token_ids=(2,))
SHAPE = initial.Shape(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, hidden=48, init="random")
SCHEDULE = training.Schedule(steps=60, rate=1e-2, warmup=10, decay=0.0)
PACKING = Packing(slots=(16, 32), tokens=64, candidates=0, sampled=1, by_writer=(0.0, 0.5, 1.0))


def of_family(family, **changes):
    """The shape, with heads that have keys of their own."""
    return dataclasses.replace(SHAPE, family=family, kv_heads=SHAPE.heads, **changes)


@pytest.fixture(scope="module")
def target():
    params = llama.init_params(TARGET, jax.random.key(0), jnp.float32)
    # distributions with something to learn
    params = jax.tree.map(lambda leaf: leaf * 8.0 if leaf.ndim > 1 else leaf, params)
    return llama.language_model(TARGET, jnp.float32), params


@pytest.fixture(scope="module")
def shard(target):
    """Random texts of 3 to 30 tokens with the target's labels."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 31, 40)
    tokens = rng.integers(3, VOCAB, sizes.sum()).astype(np.uint16)
    writer = rng.integers(0, 3, sizes.sum()).astype(np.uint8)
    offsets = np.cumsum([0, *sizes])
    none = np.zeros((len(tokens), 0))
    bare = Shard(tokens, writer, offsets, np.zeros(40, np.uint8), np.ones(40, np.float32), none, none, ("a",))
    return label_shard(build_labeller(target[0], K, positions=128), target[1], bare, VOCAB)


def test_an_epoch_holds_every_text_once_and_every_prediction_is_of_its_next_token(shard):
    """Its weight is that of who wrote the token predicted."""
    corpus, seen = Corpus([shard], VOCAB), {}
    order = BatchOrder(corpus, PACKING, seed=1)
    writers = {tuple(shard.tokens[a:b].tolist()): shard.writer[a:b] for a, b in corpus.spans}
    texts = {tuple(text.tolist()) for text in np.split(shard.tokens, shard.offsets[1:-1])}
    step = 0
    while order.epoch_of(step) < 1:
        batch = order.at(step)
        following, weight = (array.reshape(batch.tokens.shape) for array in (batch.following, batch.weight))
        for row in range(len(batch.tokens)):
            for segment in set(batch.segments[row]) - {GAP}:
                at = np.flatnonzero(batch.segments[row] == segment)
                assert np.array_equal(batch.positions[row, at], np.arange(len(at)))
                assert np.array_equal(following[row, at[:-1]], batch.tokens[row, at[1:]])
                text = tuple(batch.tokens[row, at].tolist())
                seen[text] = seen.get(text, 0) + 1
                assert weight[row, at].tolist() == [*np.take(PACKING.by_writer, writers[text][1:]), 0]
        assert not weight[batch.segments == GAP].any()
        step += 1
    assert set(seen) == texts
    assert sum(seen.values()) <= len(texts) + 8  # rows taken again to fill a last batch


def test_sampled_candidates_stand_for_the_whole_vocabulary(shard):
    """The normaliser over candidates is unbiased: a correction that is forgotten, or has the wrong count, shows."""
    logits = np.random.default_rng(0).normal(size=VOCAB)
    order = BatchOrder(Corpus([shard], VOCAB), Packing(slots=(32,), tokens=32, candidates=40, sampled=12), seed=3)
    estimates = []
    for step in range(400):
        batch = order.at(step)
        assert len(set(batch.candidates.tolist())) == 40
        estimates.append(np.exp(logits[batch.candidates] + batch.correction).sum())
        top = batch.candidates[batch.top]
        assert np.isin(top[np.isfinite(batch.log_prob)], shard.top).all()
    estimates, truth = np.array(estimates), np.exp(logits).sum()
    assert abs(estimates.mean() - truth) < 4 * estimates.std() / 20 and estimates.std() > 0


CAP = 3.0


def naive_loss(hidden, embedding, correction, labels):
    logits = CAP * jnp.tanh(hidden @ embedding.T / CAP)
    log_q = jax.nn.log_softmax(logits + correction[None, :], axis=-1)
    values = forward_kl(*coarse_distributions(labels.log_prob, jnp.take_along_axis(log_q, labels.top, axis=1)))
    return jnp.sum(values * labels.weight) / jnp.sum(labels.weight)


def test_the_chunked_loss_and_its_gradient_are_the_plain_ones(shard):
    batch = BatchOrder(Corpus([shard], VOCAB), PACKING, seed=1).at(0)
    rng = np.random.default_rng(0)
    hidden, embedding = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32), jnp.asarray(rng.normal(size=(VOCAB, 8)))
    embedding = embedding.astype(jnp.float32)
    labels = Labels(*(jnp.asarray(array) for array in (batch.weight, batch.following, batch.top, batch.log_prob)))
    rest = (jnp.asarray(batch.correction), labels)
    chunked = build_head_loss(forward_kl, chunk=16, dtype=jnp.float32, cap=CAP)
    value, gradient = jax.value_and_grad(lambda h, e: 3.0 * chunked(h, e, *rest)[0], argnums=(0, 1))(hidden, embedding)
    expected = jax.value_and_grad(lambda h, e: 3.0 * naive_loss(h, e, *rest), argnums=(0, 1))(hidden, embedding)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for mine, plain in zip(gradient, expected[1], strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_of_a_row_do_not_see_each_other(family):
    """Packed with segments as in training, and one by one through the cache of decoding: the same logits."""
    config = initial.drafter_config(of_family(family), TARGET)
    params = families.family(family).init_params(config, jax.random.key(0), jnp.float32)
    params = jax.tree.map(lambda leaf: leaf * 8.0 if leaf.ndim > 1 else leaf, params)
    model = families.family(family).language_model(config, jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, VOCAB, (1, 12)), jnp.int32)
    segments = jnp.asarray([[0] * 5 + [1] * 7])
    positions = jnp.asarray([[*range(5), *range(7)]])
    mask = segments[:, :, None] == segments[:, None, :]
    packed, _ = training.stack(config, jnp.float32).apply({"params": params}, tokens, None, positions, mask)
    for start, stop in ((0, 5), (5, 12)):
        alone, _ = model.apply(params, tokens[:, start:stop], model.init_cache(params, 1, 16))
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=1e-4, atol=1e-4)


def without_labels(shard):
    return shard._replace(top=shard.top[:, :0], log_prob=shard.log_prob[:, :0])


def trained(folder, shard, steps, stop_at=None):
    """A run of the loop on the shard, cut after `stop_at` steps as a process that ends would."""
    schedule = training.Schedule(steps=steps, rate=3e-3, warmup=2, ema=0.9, accumulate=2)
    config = initial.drafter_config(SHAPE, TARGET)
    order = BatchOrder(Corpus([shard], VOCAB), PACKING, seed=1)
    state = training.init_state(initial.initial_params(SHAPE, TARGET, None, None, 0), schedule)
    step = training.build_step(config, schedule, forward_kl, dtype=jnp.float32, chunk=16)

    def cut(state, batch):
        if stop_at is not None and int(state.step) >= stop_at:
            raise KeyboardInterrupt
        return step(state, batch)

    return loop.train(folder, state, cut, order, steps, loop.Intervals(save_every=3, log_every=2))


@pytest.mark.parametrize("family", [gpt2, gpt_neox, mistral, phi3, qwen3])
def test_the_drafter_of_any_family_is_a_llama(family):
    target = family.example_config()
    drafter = initial.drafter_config(SHAPE, target)
    assert type(drafter) is llama.LlamaConfig and drafter.vocab_size == target.vocab_size
    assert (drafter.rope_theta, drafter.eos_token_ids) == (getattr(target, "rope_theta", 1e4), target.eos_token_ids)
    assert drafter.rope_scaling is None and drafter.context == target.context  # phi3's scaling is of its own heads
    assert drafter.rms_norm_eps == getattr(target, "rms_norm_eps", 1e-6)
    with pytest.raises(ValueError, match=f"layers of a llama, the target has {type(target).__name__}"):
        initial.drafter_config(dataclasses.replace(SHAPE, init="first_layers", layers=1), target)


def test_a_drafter_has_any_family_with_one_mlp_a_layer():
    """And the sizes that were asked for; every other family says why not."""
    target, refused = dataclasses.replace(TARGET, rms_norm_eps=1e-3, rope_theta=321.0), {}
    for name in families.family_names():
        shape = of_family(name, hidden=128)  # four times the width, as bloom's
        try:
            config = initial.drafter_config(shape, target)
        except ValueError as error:
            refused[name] = str(error)
            continue
        assert type(config) is families.config_class(families.family(name)) and config.tie_word_embeddings
        assert (config.vocab_size, config.eos_token_ids, config.context) == (VOCAB, (2,), TARGET.context)
        assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 128, 2)
        assert getattr(config, "rope_theta", 321.0) == 321.0 and getattr(config, "rms_norm_eps", 1e-3) == 1e-3
        assert training.stack(config, jnp.float32).config is config
    why = dict.fromkeys(("mixtral", "qwen3_moe"), "one MLP")
    why |= dict.fromkeys(("llama_reading", "llama_block"), "target_layers")
    why |= {name: f"shape.family '{name}' has an encoder" for name in ("t5", "mt5")}
    assert refused.keys() == why.keys() and all(why[name] in refused[name] for name in why)


test_sizes_that_a_family_does_not_have_are_named = refusals(
    ({"family": "gpt2"}, "kv-heads of a gpt2 of width 32 with 2 heads is 2, got 1: set shape.kv-heads to 2"),
    ({"family": "gpt_neox", "kv_heads": 2, "head_dim": 8}, "set shape.head-dim to 16"),
    ({"family": "bloom", "kv_heads": 2}, "set shape.hidden to 128"),
    ({"family": "gpt2", "init": "first_layers"}, "layers of a gpt2, the target has LlamaConfig"),
    by=lambda changes: initial.drafter_config(dataclasses.replace(SHAPE, **changes), TARGET),
)


def learnt(config, params, shard, top, layers=(), **options):
    """Metrics of the first step and of the last ten of a short training, whose labels are nearly always the first."""
    log_prob = np.log(np.array([0.97, 0.01, 0.01, 0.009]))[None].repeat(len(top), axis=0)
    labelled = shard._replace(top=top.astype(np.uint16), log_prob=log_prob.astype(np.float16))
    packing = Packing(slots=(32,), tokens=256, candidates=0, sampled=1, by_writer=(1.0, 1.0, 1.0))
    order, state = BatchOrder(Corpus([labelled], VOCAB, layers), packing, seed=1), training.init_state(params, SCHEDULE)
    step, found = training.build_step(config, SCHEDULE, forward_kl, dtype=jnp.float32, chunk=64, **options), []
    for index in range(SCHEDULE.steps):
        state, metrics = step(state, order.at(index))
        found.append((float(metrics.agreement), float(metrics.acceptance), float(metrics.last_agreement)))
    return found[0], np.mean(found[-10:], axis=0)


def test_a_drafter_of_another_family_learns_its_labels(shard, target):
    """The most probable next token is a function of the present one, so that it can be learnt in few steps."""
    top = np.concatenate([3 + shard.tokens[:, None] % 4, shard.top[:, 1:] % 20 + 10], axis=1)
    shape = of_family("gpt2", init="projection")
    params = initial.initial_params(shape, TARGET, target[1], np.ones(VOCAB), 0)
    begun, (agreement, acceptance, _) = learnt(initial.drafter_config(shape, TARGET), params, shard, top)
    assert max(begun[:2]) < 0.5 and agreement > 0.9 and acceptance > 0.5, (begun, agreement, acceptance)


def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(tmp_path, shard):
    whole = trained(tmp_path / "whole", shard, 12)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", shard, 12, stop_at=8)
    again = trained(tmp_path / "cut", shard, 12)
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), whole, again)
    assert all(jax.tree.leaves(same)) and int(again.step) == 12
    lines = [(tmp_path / name / loop.METRICS).read_text().splitlines() for name in ("whole", "cut")]
    steps = [[line.split(",")[0] for line in text] for text in lines]
    assert steps[0] == steps[1]


def test_a_damaged_checkpoint_is_named_and_the_one_before_stays(tmp_path, shard):
    trained(tmp_path, shard, 6)
    last = tmp_path / "checkpoints" / "6"
    for path in last.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="checkpoints/6"):
        trained(tmp_path, shard, 8)
    assert (tmp_path / "checkpoints" / "3").is_dir()


def test_an_induction_drafter_copies_before_it_is_trained():
    big = llama.LlamaConfig(400, 160, 64, 2, 4, 2, 32, tie_word_embeddings=True)
    params = llama.init_params(big, jax.random.key(0), jnp.float32)
    rng = np.random.default_rng(0)
    half = rng.permutation(400)[:60]
    text = jnp.asarray(np.concatenate([half, rng.permutation(half), half])[None], jnp.int32)
    hits = {}
    for init in ("projection", "induction"):
        shape = initial.Shape(
            layers=2, width=160, heads=4, kv_heads=2, head_dim=64, hidden=64, init=init, rope_theta=1e8
        )
        drafter = initial.initial_params(shape, big, params, np.ones(400), 0)
        logits, _ = llama.module(initial.drafter_config(shape, big), jnp.float32).apply({"params": drafter}, text, None)
        hits[init] = float(np.mean(np.argmax(logits[0, 120:-1], axis=-1) == np.asarray(text)[0, 121:]))
    assert hits["induction"] > 0.5 > 0.1 > hits["projection"]


def test_first_layers_are_the_targets_own(target):
    shape = initial.Shape(layers=1, init="first_layers")
    params = initial.initial_params(shape, TARGET, target[1], None, 0)
    mine, theirs = (tree["layer_0"]["mlp"]["down"]["kernel"] for tree in (params, target[1]))
    assert "layer_1" not in params and bool(jnp.all(mine == theirs))


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path, shard, monkeypatch):
    folder = ShardFolder(tmp_path, {"seed": 1})
    folder.add("00000", shard)

    def full(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdec_jax.distillation.shards.save_file", full)
    with pytest.raises(OSError, match="00001.safetensors.*No space left"):
        folder.add("00001", shard)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.safetensors", "manifest.json"]
    assert ShardFolder(tmp_path).load(0).num_tokens == shard.num_tokens


def test_shards_come_back_and_damage_is_named(tmp_path, shard):
    ShardFolder(tmp_path, {"seed": 1}).add("00000", shard, idle=0.1)
    again = ShardFolder(tmp_path, {"seed": 1})
    assert all(np.array_equal(a, b) for a, b in zip(again.load(0)[:7], shard[:7], strict=True))
    with pytest.raises(ValueError, match="other settings .seed."):
        ShardFolder(tmp_path, {"seed": 2})
    path = tmp_path / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="00000.safetensors is damaged"):
        again.load(0)
    path.unlink()
    with pytest.raises(ValueError, match="00000.safetensors is listed"):
        again.load(0)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        ShardFolder(tmp_path)


def test_hidden_states_stay_on_disk_and_their_damage_is_named(tmp_path, shard):
    states = np.random.default_rng(0).normal(size=(shard.num_tokens, 2, 6)).astype(ml_dtypes.bfloat16)
    folder = ShardFolder(tmp_path)
    folder.add("00000", shard._replace(hidden=states), layers=[3, 5])
    again = ShardFolder(tmp_path).load(0)
    assert isinstance(again.hidden, np.memmap) and np.array_equal(again.hidden, states)
    assert folder.load(0, hidden=False).hidden.shape == (shard.num_tokens, 0, 0)
    path = tmp_path / "00000.hidden.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"ab")
    with pytest.raises(ValueError, match="00000.hidden.npy is missing or damaged: delete it, and run --stage label"):
        folder.load(0)
    assert folder.load(0, hidden=False).num_tokens == shard.num_tokens


def test_batches_bring_the_hidden_states_of_the_position_before(shard):
    index, layer = np.indices((shard.num_tokens, 3))
    states = np.stack([index // 32, index % 32, layer], axis=-1).astype(ml_dtypes.bfloat16)  # exact in bfloat16
    other = states.copy()
    other[..., 2] += 8
    corpus = Corpus([shard._replace(hidden=states), shard._replace(hidden=other)], VOCAB, layers=(2, 0))
    order, seen = BatchOrder(corpus, PACKING, seed=1), {0: 0, 8: 0}
    for step in range(6):
        batch = order.at(step)
        assert not batch.hidden[batch.positions == 0].astype(np.float32).any()
        for row, at in np.argwhere(batch.positions > 0):
            (high, low, layer), (_, _, first) = batch.hidden[row, at].astype(np.int64)
            before = 32 * high + low
            assert shard.tokens[before] == batch.tokens[row, at - 1] and (layer - first, first % 8) == (2, 0)
            assert before + 1 not in shard.offsets and shard.tokens[before + 1] == batch.tokens[row, at]
            seen[int(first)] += 1
    assert min(seen.values()) > 50  # of both shards


def test_a_drafter_that_reads_learns_what_only_the_target_knows(shard):
    """What comes after a token is in the hidden state of the token before it, and nowhere else in the text.

    So the first step, which reads it, gets nearly all of it right; a step that has the drafter's own state in its place
    can do no better than a guess among four, however long it is trained.
    """
    rng, classes = np.random.default_rng(0), 4
    known = rng.integers(0, classes, shard.num_tokens)
    top = np.stack([3 + np.roll(known, 1), *(np.full_like(known, 20 + i) for i in range(K - 1))], axis=1)
    states = 4.0 * np.eye(8)[known][:, None].astype(ml_dtypes.bfloat16)
    base = llama.LlamaConfig(VOCAB, 32, 48, 1, 2, 1, 16, tie_word_embeddings=True)
    config = llama_reading.reading_config(base, (1,), 8)
    params = llama_reading.init_params(config, jax.random.key(3), jnp.float32)
    _, (first, _, last) = learnt(config, params, shard._replace(hidden=states), top, (0,), unroll=Unroll(2, 1.0))
    assert first > 0.9 and last < 0.6


def test_what_later_steps_see_of_a_batch_is_its_first_rows(shard, target):
    """The share of rows changes what later steps are taken of, and the first step not at all."""
    config = llama_reading.reading_config(initial.drafter_config(SHAPE, TARGET), (1, 2), TARGET.hidden_size)
    params = llama_reading.init_params(config, jax.random.key(0), jnp.float32)
    params["own"]["kernel"] = jax.random.normal(jax.random.key(1), params["own"]["kernel"].shape)
    mine = label_shard(build_labeller(target[0], K, layers=(1, 2), positions=128), target[1], shard, VOCAB)
    batch = BatchOrder(Corpus([mine], VOCAB, (0, 1)), PACKING, seed=1).at(0)
    texts = Texts(batch.tokens, batch.positions, batch.segments, batch.hidden)
    whole = unrolled(config, params, texts, Unroll(3, 1.0), jnp.float32)
    part = unrolled(config, params, texts, Unroll(3, 0.5), jnp.float32)
    rows = len(batch.tokens) // 2
    for one, other, size in zip(whole, part, (2 * rows, rows, rows), strict=True):
        assert other.shape[0] == size
        np.testing.assert_allclose(one[:size], other, atol=1e-5)
    assert np.abs(whole[0] - whole[1]).max() > 0.1


@pytest.mark.parametrize("reads", [(), (1, 2)])
def test_a_target_asked_while_training_teaches_what_stored_labels_do(shard, target, reads):
    """A hidden state of the wrong position, or one that sees its neighbour in the row, changes the loss."""
    config = initial.drafter_config(SHAPE, TARGET)
    params = initial.initial_params(SHAPE, TARGET, target[1], None, 0)
    if reads:
        config = llama_reading.reading_config(config, reads, TARGET.hidden_size)
        params = llama_reading.with_reading(config, params, jnp.float32)
        for name in ("read", "merge"):
            params[name]["kernel"] = jax.random.normal(jax.random.key(1), params[name]["kernel"].shape)
        params["merge"]["down"] = jax.random.normal(jax.random.key(2), params["merge"]["down"].shape)
    packing = dataclasses.replace(PACKING, slots=(64,))
    stored = label_shard(build_labeller(target[0], VOCAB, layers=reads), target[1], shard, VOCAB, np.float32)
    found = []
    for data, layers, teacher in ((stored, range(len(reads)), None), (without_labels(shard), (), target)):
        batch = BatchOrder(Corpus([data], VOCAB, layers), packing, seed=1).at(0)
        assert (batch.segments > 0).any()
        model, target_params = teacher or (None, None)
        step = training.build_step(config, SCHEDULE, forward_kl, dtype=jnp.float32, chunk=16, target=model)
        state = training.init_state(jax.tree.map(jnp.array, params), SCHEDULE)
        found.append(step(state, batch, target_params)[1])
    np.testing.assert_allclose(found[0], found[1], rtol=0.01 if reads else 1e-3)  # stored states are bfloat16


test_bad_settings_name_the_value = refusals(
    (lambda: Unroll(steps=0), r"steps must lie in \[1, inf\)"),
    (lambda: Unroll(share=0.0), r"share must lie in \(0, 1\]"),
    (lambda: training.Schedule(steps=0), "steps"),
    (lambda: training.Schedule(steps=5, warmup=0, rate=0.0), "rate"),
    (lambda: training.Schedule(steps=5, warmup=0, ema=1.0), "ema"),
    (lambda: Packing(by_writer=(0.0, 0.0, 0.0)), "weights"),
    (lambda: initial.Shape(layers=0), "layers"),
    (lambda: initial.Shape(init="magic"), "magic"),
    (lambda: initial.Shape(family="gpt3"), "unknown model_type 'gpt3'"),
    (lambda: initial.Shape(family="gpt2", init="induction"), "init 'induction' is for .* got shape.family 'gpt2'"),
    (lambda: initial.Shape(family="gpt_neox", reads=(3,)), r"reads \(3,\) is for .* got shape.family 'gpt_neox'"),
    (lambda: loop.Intervals(log_every=0), "log_every"),
    (lambda: lk_hybrid(float("nan")), "eta must be positive, got nan"),
    (lambda: Corpus([], VOCAB), "no conversations"),
    (lambda: training.stack(llama_reading.example_config(), jnp.float32), "llama_reading cannot be trained"),
    (lambda shard: BatchOrder(Corpus([without_labels(shard)], VOCAB), Packing((32,), 32, 40, 12), seed=3), "label it"),
)


N, OUTCOMES = 5, 7
rng = np.random.default_rng(0)
P_LOGITS, Q_LOGITS = (rng.normal(size=(N, OUTCOMES)) * 1.5 for _ in range(2))
RATE = 0.5  # eta of the hybrid


def naive_hybrid(p, q, frozen):
    """The mixture with its weight at the point of linearisation in `frozen`."""
    weight = np.exp(-RATE * np.minimum(p, frozen).sum(-1).mean())
    return weight * (p * np.log(p / q)).sum(-1) + (1 - weight) * (1 - np.minimum(p, q).sum(-1))


NAIVE = {
    "forward_kl": (forward_kl, lambda p, q, _: (p * np.log(p / q)).sum(-1)),
    "nla": (nla, lambda p, q, _: -np.log(np.minimum(p, q).sum(-1))),
    "lk_hybrid": (lk_hybrid(RATE), naive_hybrid),
}


def log(distribution):
    return jnp.asarray(np.log(distribution), jnp.float32)


@pytest.mark.parametrize("name", NAIVE)
def test_values_are_those_of_numpy_and_gradients_finite_differences(name):
    loss, naive = NAIVE[name]
    p, frozen, step = softmax(P_LOGITS, -1), softmax(Q_LOGITS, -1), 1e-6
    np.testing.assert_allclose(loss(log(p), log(frozen)), naive(p, frozen, frozen), rtol=2e-5, atol=2e-6)

    def value(logits):
        return jnp.sum(loss(log(p), jax.nn.log_softmax(logits, axis=-1)))

    gradient = jax.grad(value)(jnp.asarray(Q_LOGITS, jnp.float32))
    for index in np.ndindex(N, OUTCOMES):
        moved = Q_LOGITS.copy(), Q_LOGITS.copy()
        moved[0][index] += step
        moved[1][index] -= step
        slope = np.subtract(*(naive(p, softmax(logits, -1), frozen).sum() for logits in moved)) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAIVE)
def test_zeros_on_either_side_leave_value_and_gradient_finite_and_the_target_untouched(name):
    loss, _ = NAIVE[name]
    p = jnp.asarray([[0.0, -jnp.inf, -jnp.inf], [-jnp.inf, 0.0, -jnp.inf]])
    logits = jnp.asarray([[-200.0, 0.0, 1.0], [0.0, 0.0, -jnp.inf]])

    def value(p, z):
        return jnp.sum(loss(p, jax.nn.log_softmax(z, axis=-1)))

    to_p, to_q = jax.grad(value, argnums=(0, 1))(p, logits)
    assert jnp.isfinite(value(p, logits)) and jnp.all(jnp.isfinite(to_q)) and not jnp.any(to_p)


def test_the_rest_is_one_outcome():
    p, q = softmax(P_LOGITS, -1), softmax(Q_LOGITS, -1)
    labels = np.argsort(-p, axis=-1)[:, :3]
    kept_of_both = [np.take_along_axis(distribution, labels, axis=-1) for distribution in (p, q)]
    for coarse, kept in zip(coarse_distributions(*map(log, kept_of_both)), kept_of_both, strict=True):
        expected = np.concatenate([kept, 1 - kept.sum(-1, keepdims=True)], axis=-1)
        np.testing.assert_allclose(jnp.exp(coarse), expected, atol=2e-6)


def test_a_label_of_minus_infinity_belongs_to_the_rest_on_both_sides():
    top, drafter = jnp.log(jnp.asarray([[0.5, 0.2]])), jnp.log(jnp.asarray([[0.4, 0.3]]))
    p, q = coarse_distributions(jnp.asarray([[top[0, 0], -jnp.inf]]), drafter)
    np.testing.assert_allclose(jnp.exp(p), [[0.5, 0.0, 0.5]], atol=1e-6)
    np.testing.assert_allclose(jnp.exp(q), [[0.4, 0.0, 0.6]], atol=1e-6)
    padded = jnp.asarray([[top[0, 0], -jnp.inf, -jnp.inf]]), jnp.asarray([[-1.0, -2.0, -jnp.inf]])
    gradient = jax.grad(lambda q: jnp.sum(forward_kl(*coarse_distributions(padded[0], q))))(padded[1])
    assert jnp.all(jnp.isfinite(gradient)) and gradient[0, 0] != 0 and not jnp.any(gradient[0, 1:])


@pytest.mark.parametrize("probability", [[0.5, 0.5], [0.75, 0.375]])
def test_a_rest_of_nothing_or_less_is_clipped(probability):
    """Exact in float32, unlike a softmax: one minus their sum is 0, or under it as rounding may leave it."""
    label = jnp.log(jnp.asarray([probability]))

    def value(drafter):
        return jnp.sum(forward_kl(*coarse_distributions(label, drafter)))

    assert jnp.isfinite(coarse_distributions(label, label)[1][0, -1])
    assert jnp.isfinite(value(label)) and jnp.all(jnp.isfinite(jax.grad(value)(label)))
