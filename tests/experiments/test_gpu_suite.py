"""The GPU's suite on a CPU, and models with ballast: a small model's text at another's cost."""

import json

import jax
import numpy as np
import pytest

from experiments import gpu_suite
from experiments.gpu_suite import with_ballast
from experiments.lib.smoke import tiny_pair
from specdec_jax.models import llama
from specdec_jax.text.generation import SamplingParams, build_pair, generate

SHAPE = llama.LlamaConfig(64, 128, 256, 3, 2, 2, 64, max_position_embeddings=1024)


def test_ballast_changes_no_token_costs_its_passes_and_rolls_back():
    target, _ = tiny_pair()
    heavy = with_ballast(target, SHAPE, "float32")
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3)
    texts = [generate("abc", sampling, pair=build_pair(one, None), chat=False).tokens for one in (target, heavy)]
    assert texts[0] == texts[1]
    tokens = np.ones((1, 4), np.int32)

    def flops(model, params):
        cache = model.init_cache(params, 1, 32)
        return jax.jit(model.apply).lower(params, tokens, cache).compile().cost_analysis()["flops"]

    size = sum(leaf.size for leaf in jax.tree.leaves(heavy.params[1])) - 64 * 128  # but the embedding, a lookup
    assert flops(heavy.model, heavy.params) - flops(target.model, target.params) > 2 * 4 * size
    cache = heavy.model.with_length(heavy.model.init_cache(heavy.params, 2, 16), np.array([3, 5], np.int32))
    assert cache.length.tolist() == cache.ballast.length.tolist() == [3, 5]


def test_the_suite_measures_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    options = ["--smoke", "--max-new-tokens", "8", "--batches", "2", "--repeats", "2", "--out", str(out)]
    monkeypatch.setenv("HOME", str(tmp_path))  # of measured costs, and not of compiled programs
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setattr(gpu_suite, "OTHER_GRAPHS", {"without graphs": gpu_suite.OTHER_GRAPHS["without graphs"]})
    assert gpu_suite.main(options) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    wanted = {"bandwidth of a copy", "graph: times as long without graphs", "ballast: c", "ballast: batch 2, survival"}
    assert wanted <= {row["what"] for row in rows} and all(row["value"] > 0 for row in rows)

    monkeypatch.setattr(gpu_suite, "bandwidth", lambda config: pytest.fail("measured again"))
    assert gpu_suite.main(options) == 0
    assert gpu_suite.main(["--out", str(tmp_path / "real")]) == 2
    assert "there is no accelerator here" in capsys.readouterr().err
