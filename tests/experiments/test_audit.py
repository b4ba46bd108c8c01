"""The audit of other engines: a bias is found, chance is not one, and rounding is told from another choice."""

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import audit, peers
from experiments.lib.engines import Failed
from specdec_jax.loading import load_model

LAW = np.random.default_rng(0).dirichlet(np.ones(256))
TWICE = LAW * np.where(np.arange(256) < 64, 2.0, 1.0)  # a first token that is too probable


def entry(law=LAW, samples=4000, gaps=(), seed=1):
    counts, both = np.random.default_rng(seed).multinomial(samples, law / law.sum()), {"float32": gaps, "bfloat16": []}
    return {"engine": "vllm", "method": "draft-3", "counts": counts, "gaps": both}


def test_chance_is_no_bias_and_a_bias_is_found():
    p_values = [audit.judged(entry(seed=seed), LAW)["p_value"] for seed in range(40)]
    assert min(p_values) > audit.LEVEL and 0.2 < np.mean(p_values) < 0.8
    row = audit.judged(entry(TWICE), LAW)
    assert row["biased"] and row["p_value"] < 1e-6
    assert row["seen_from"] < ((TWICE / TWICE.sum() - LAW) ** 2 / LAW).sum()  # as promised
    for gaps, biased in (((), False), ((0.0, 2e-4), False), ((0.0, 0.4), True)):  # greedy: rounding, or a choice
        assert audit.judged(entry(gaps=gaps), LAW)["biased"] == biased


def test_the_smallest_bias_that_is_promised_is_found_in_nine_of_ten_runs():
    shift = np.resize([1.0, -1.0], 256) * np.sqrt(audit.smallest_seen(255, audit.LEVEL / 4) / 100_000)
    biased = [audit.judged(entry(LAW * (1 + shift), 100_000, seed=seed), LAW)["biased"] for seed in range(60)]
    assert 0.75 < np.mean(biased) < 0.99


def test_the_exact_law_and_greedy_gaps_are_those_of_the_weights_that_engines_load(tmp_path):
    target, drafter = audit.tiny_pair()
    law = audit.exact_law(target, (1, 2), 2)

    def chances(*text):
        cache = target.model.init_cache(target.params, 1, 4)
        return np.asarray(jax.nn.softmax(target.model.apply(target.params, np.array([text]), cache)[0][0, -1]))

    first = chances(1, 2)
    np.testing.assert_allclose(law, np.concatenate([first[t] * chances(1, 2, t) for t in range(4)]), rtol=1e-4)
    assert law.min() > 1e-3 and abs(law - audit.exact_law(drafter, (1, 2), 2)).sum() > 0.3  # drafts are rejected
    weights = peers.export(tmp_path / "weights", target, drafter, "F32")
    for name in ("target", "target.gguf"):
        loaded = load_model(weights[name], dtype="float32")
        np.testing.assert_allclose(audit.exact_law(loaded, (1, 2), 2), law, rtol=1e-4)
    best, other = np.argsort(-first)[:2]
    gaps = audit.greedy_gaps(target, [(1, 2)] * 2, [(best,), (other,)])
    np.testing.assert_allclose(gaps, [0, np.log(first[best] / first[other])], atol=1e-4)


@pytest.mark.parametrize(("control", "code"), [(TWICE, 0), (LAW, 1)])
def test_an_audit_fails_where_the_control_is_not_found_out(tmp_path, monkeypatch, control, code):
    def answer(engine, request):
        if request["mode"] == "lookup":
            raise Failed("no | lookup")
        law = control if request["mode"] == audit.CONTROL else LAW
        drawn = np.random.default_rng(request["seed"]).choice(256, p=law / law.sum())
        tokens = [*map(int, np.unravel_index(drawn, (4,) * 4)), *[0] * 60]
        text = request["text"] * (request["mode"] == "draft-3") + "".join("abcd"[token] for token in tokens)
        return {"text": f"\n{text}\n"} if engine == "llama.cpp" else {"tokens": tokens}

    def start(self, contender):
        return SimpleNamespace(answer=partial(answer, contender.peer), close=lambda: None)

    methods = {"transformers": ("plain", audit.CONTROL, "lookup"), "llama.cpp": ("plain", "draft-3")}
    monkeypatch.setattr(audit, "METHODS", methods)
    monkeypatch.setattr(audit.Sides, "_start", start)
    monkeypatch.setattr(audit, "exact_law", lambda *_: LAW)
    monkeypatch.setattr(audit, "greedy_gaps", lambda *_: [0.0])
    out = tmp_path / "run"
    assert audit.main(["--out", str(out), "--samples", "1000", "--greedy", "1"]) == code
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["biased"] for row in rows] == [False, not code, False, False]  # not the one that failed
    monkeypatch.setattr(audit, "METHODS", {"transformers": ("lookup",)})  # nothing could be audited
    assert audit.main(["--out", str(tmp_path / "none"), "--samples", "200", "--greedy", "1"]) == 1
    assert "does not run: no / lookup" in (out / "table.md").read_text()


@pytest.mark.parametrize(("law", "code"), [(LAW, 0), (TWICE, 1)])
def test_a_server_of_the_written_target_is_audited(tmp_path, monkeypatch, capsys, law, code):
    class Completions(BaseHTTPRequestHandler):
        def do_POST(self):
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions" and fields["model"] == "tiny"
            drawn = np.random.default_rng(fields["seed"]).choice(256, p=law / law.sum())
            text = "".join("abcd"[token] for token in np.unravel_index(drawn, (4,) * 4)) + "a" * 60
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"text": text[: fields["max_tokens"]]}]}).encode())

        def log_message(self, *_):
            pass

    assert audit.main(["--write", str(tmp_path / "tiny")]) == 0 and (tmp_path / "tiny" / "target.gguf").is_file()
    monkeypatch.setattr(audit, "exact_law", lambda *_: LAW)
    monkeypatch.setattr(audit, "greedy_gaps", lambda *_: [0.0])
    server = HTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    options = ["--url", url, "--model", "tiny", "--samples", "1000", "--greedy", "1"]
    assert audit.main([*options, "--out", str(tmp_path / "run")]) == code
    server.shutdown()
    server.server_close()
    assert audit.main([*options, "--out", str(tmp_path / "gone")]) == 2
    assert "no completions of abcd from" in capsys.readouterr().err and not (tmp_path / "gone").exists()
