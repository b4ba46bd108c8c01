"""Claims: native products, attention and sums are right in every shape, a row's result does not depend on what shares
its pass, and what goes wrong with the compiler or its cache leaves XLA's products, with one line that says why.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from specdec_jax import kernels
from specdec_jax.kernels import compiled
from specdec_jax.models.attention import _attend_by_xla

BF16 = ml_dtypes.bfloat16
COMPILER = next(filter(None, map(shutil.which, compiled.COMPILERS)), None)
PATHS = compiled.paths_here() if COMPILER else ()
path_now = kernels.path.__wrapped__  # not the path that this process keeps
REGISTERED = []
needs_path = pytest.mark.skipif(not PATHS, reason="no compiler, or a processor without a path")


@pytest.fixture(
    scope="module", params=[*PATHS[:1], *(pytest.param(path, marks=pytest.mark.long) for path in PATHS[1:])]
)
def library(request):
    """Of the processor's own path; slower ones take the compiler ten seconds each."""
    return compiled.library(request.param)


def product(x, weights, scale):
    """In float64, and the sum of what the terms amount to, which rounding errors are measured by."""
    x, weights, scale = (one.astype(np.float64) for one in (x, weights, scale))
    return x @ weights.T * scale, np.abs(x) @ np.abs(weights).T * scale


def test_products_are_right_and_rows_do_not_depend_on_others(library):
    rng = np.random.default_rng(0)
    shapes = [(rows, 67, 70) for rows in range(1, 34)] + [(1, 1, 1), (3, 1, 40), (5, 640, 1), (33, 32, 16), (2, 65, 64)]
    shapes += [tuple(map(int, rng.integers(1, (40, 200, 150)))) for _ in range(75)]
    for rows, depth, columns in shapes:
        x, weights = rng.normal(size=(rows, depth)).astype(BF16), rng.normal(size=(columns, depth)).astype(BF16)
        small, scale = rng.integers(-127, 128, (columns, depth)).astype(np.int8), rng.random(columns).astype(np.float32)
        for matrix, factor in ((weights, None), (small, scale)):
            found = compiled.call(library, x, matrix, factor)
            exact, size = product(x, matrix, np.ones(columns) if factor is None else factor)
            assert (np.abs(found - exact) <= 1e-6 * size).all(), (rows, depth, columns, matrix.dtype)
            for some in (slice(0, 1), slice(rows // 2, rows)):
                alone = compiled.call(library, x[some], matrix, factor)
                np.testing.assert_array_equal(alone, found[some], f"{rows, depth, columns, matrix.dtype}")


def attention(query, keys, values, mask, biases, cap):
    """In float64, its size, and with weights rounded to bfloat16."""
    query, keys, values = (one.astype(np.float64) for one in (query, keys, values))
    keys, values = (np.repeat(one, query.shape[2] // keys.shape[1], 1) for one in (keys, values))
    score = query.swapaxes(1, 2) @ keys.swapaxes(2, 3)  # [B, H, T, S]
    score = np.where(mask[:, None], (cap * np.tanh(score / cap) if cap else score) + biases, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    rounded = weight.astype(BF16).astype(np.float64)
    return tuple(each.swapaxes(1, 2) for each in (weight @ values, weight @ np.abs(values), rounded @ values))


def test_attention_is_right_and_depends_on_what_is_seen_alone(library):
    """Grouped heads, windows, trees' masks, caps, biases. The same slots elsewhere, or in a longer cache, are equal."""
    rng = np.random.default_rng(0)
    for turn in range(60):
        batch, width, kv_heads, group = map(int, rng.integers(1, (4, 12, 4, 5)))
        slots, dim, cap = int(rng.integers(width, 300)), int(rng.choice([8, 24, 33, 64, 80, 128])), (0.0, 5.0)[turn % 2]
        query = (rng.normal(size=(batch, width, kv_heads * group, dim)) * 0.5).astype(BF16)
        keys, values = (rng.normal(size=(batch, kv_heads, slots, dim)).astype(BF16) for _ in range(2))
        at = rng.integers(0, slots - width + 1, batch)[:, None] + np.arange(width)
        mask = np.arange(slots) <= at[..., None]
        if turn % 3 == 1:
            mask &= np.arange(slots) > at[..., None] - 7
        if turn % 3 == 2:
            mask &= (rng.random(mask.shape) < 0.7) | (np.arange(slots) == at[..., None])
        biases = rng.normal(size=(batch, kv_heads * group, width, slots)).astype(np.float32) * (turn % 4 == 3)
        more = [biases] if turn % 4 == 3 else []
        found = compiled.call_attention(library, query, keys, values, mask, *more, cap=cap)
        exact, size, rounded = attention(query, keys, values, mask, biases, cap)
        assert (np.abs(found - exact) <= 0.004 * size).all(), turn  # weights are rounded to bfloat16
        assert (np.abs(found - rounded) <= 1e-5 * size).mean() > 0.9, turn  # to the nearest, but for ties in float32
        last = query[:1, -1:], *(one[:1, :, mask[0, -1]] for one in (keys, values))
        more = [one[:1, :, -1:, mask[0, -1]] for one in more]
        alone = compiled.call_attention(library, *last, np.ones((1, 1, mask[0, -1].sum()), bool), *more, cap=cap)
        np.testing.assert_array_equal(alone[0, 0], found[0, -1], str(turn))


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scores_that_are_no_numbers_give_what_xlas_give(library, cap):
    """In slots that a row sees; in others neither keys nor values change a row."""
    rng, inf = np.random.default_rng(0), np.inf
    query, keys, values = (rng.normal(size=(1, *some, 16)).astype(BF16) for some in ((2, 4), (2, 40), (2, 40)))
    mask, cases = np.arange(40) <= np.array([[[30], [31]]]), [(value, 0.0, 31) for value in (np.nan, inf, -inf)]
    cases += [(0.0, bias, some) for bias in (np.nan, inf, -inf, -3e38) for some in (0, 17, 31, 35, slice(0, 16))]
    for key, bias, slots in cases:
        changed, biases = keys.copy(), np.zeros((1, 4, 2, 40), np.float32)
        changed[:, :, slots] += BF16(key)
        biases[..., slots] = bias
        arrays = query, changed, values, mask, biases
        found = compiled.call_attention(library, *arrays, cap=cap).reshape(1, 2, -1)
        by_xla = _attend_by_xla(cap or None, *map(jnp.asarray, arrays))
        np.testing.assert_allclose(found, by_xla, atol=0.03, err_msg=str((key, bias, slots)))
    assert np.isnan(compiled.call_attention(library, query, keys, values, mask, 0 * biases - inf, cap=cap)).all()
    first = compiled.call_attention(library, query, keys, values, mask, cap=cap)[:, 0]
    values[:, :, 31:] = np.nan
    np.testing.assert_array_equal(compiled.call_attention(library, query, keys, values, mask, cap=cap)[:, 0], first)


@needs_path
def test_products_inside_programs():
    """Threads, `vmap` over inputs and over weights, gradients: as XLA's."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 4, 96)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(4096, 96)), jnp.bfloat16)
    small, scale = jnp.asarray(rng.integers(-127, 128, (4096, 96)), jnp.int8), jnp.ones(4096, jnp.float32)
    assert kernels.serve(x, weights) and kernels.serve(x, small)

    def by_xla(x, weights, *scale):
        out = jnp.einsum("...d,fd->...f", x, weights.astype(x.dtype), preferred_element_type=jnp.float32)
        return out * scale[0][None, None] if scale else out

    product = functools.partial(kernels.product, by_xla)
    text = jax.jit(product).lower(x, weights).as_text()
    assert kernels.PRODUCTS["bfloat16"] in text and "dot_general" not in text
    for operands in ((x, weights), (x, small, scale)):
        np.testing.assert_allclose(product(*operands), by_xla(*operands), rtol=1e-4, atol=1e-3)
    mapped = jax.vmap(product, (0, None))(x, weights)
    np.testing.assert_array_equal(mapped, product(x, weights))
    several = jax.vmap(product)(x, jnp.stack([weights] * 3))
    np.testing.assert_allclose(several, mapped, rtol=1e-4, atol=1e-3)
    few = [lambda *operands, one=one: one(*operands)[..., :7].sum() for one in (product, by_xla)]
    gradients = [jax.grad(one, (0, 1))(x, weights) for one in few]
    jax.tree.map(np.testing.assert_array_equal, *gradients)
    assert jax.grad(lambda x: product(x, small, scale).sum())(x).shape == x.shape


@needs_path
def test_means_are_right_and_rows_do_not_depend_on_others():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 601)), jnp.float32)
    for squared in (False, True):
        found = np.asarray(kernels.mean(x, squared))
        exact = np.mean(np.asarray(x, np.float64) ** (2 if squared else 1), -1, keepdims=True)
        np.testing.assert_allclose(found, exact, atol=1e-6)
        np.testing.assert_array_equal(found[3:5], kernels.mean(x[3:5], squared))


@pytest.mark.parametrize("shape", [(0, 96), (513, 96), (2, 257, 96)])
def test_what_is_left_to_xla(shape):
    weights = jnp.zeros((8, 96), jnp.bfloat16)
    assert not kernels.serve(jnp.zeros(shape, jnp.bfloat16), weights)
    assert not kernels.serve(jnp.zeros((2, 96), jnp.float32), weights)
    assert not kernels.serve(jnp.zeros((2, 96), jnp.bfloat16), weights[None])
    assert not kernels.serve(jnp.zeros((2, 96), jnp.bfloat16), weights.astype(jnp.float32))


FAKE = """#!/bin/sh
case "$*" in *--version*) echo fake; exit 0;; esac
echo compiled >> "$(dirname "$0")/count"
sleep 0.2
for last; do :; done
{}
"""
LIBRARY = """echo 'extern "C" {{ bool specdec_enable() {{ return true; }} void specdec_product() {{ {} }} }}' |
{} -x c++ -shared -fPIC - -o "$last\""""
FAULTS = {  # what the compiler does, and what is said
    "no compiler": ("", "no C++ compiler"),
    "error": ("echo 'x.cc:1: error: no such thing' >&2; exit 1", "error: no such thing"),
    "slow": ("", "fake-c++ took over 0.1 seconds"),
    "wrong": (LIBRARY.format("", COMPILER), "library's first check: ValueError: wrong products of"),
    "crash": (LIBRARY.format("__builtin_trap();", COMPILER), "library's first check: exit code -"),
}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A home of its own, and the slowest path alone; a name is registered once a process."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(kernels.VARIABLE, PATHS[-1] if PATHS else "")
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, *_, **__: REGISTERED.append(name))
    return tmp_path


def fake_compiler(folder: Path, does: str) -> Path:
    script = folder / "fake-c++"
    script.write_text(FAKE.format(does))
    script.chmod(0o755)
    return script


def test_off_says_nothing_and_an_unknown_path_is_refused(fresh, monkeypatch, capfd):
    monkeypatch.setenv(kernels.VARIABLE, "off")
    assert path_now() is None and capfd.readouterr().err == ""
    monkeypatch.setenv(kernels.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="SPECDEC_JAX_KERNELS must be one of off.*'sse9'"):
        path_now()


@needs_path
@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_leaves_xlas_products_and_says_why(fault, fresh, monkeypatch, capfd):
    does, reason = FAULTS[fault]
    if fault == "no compiler":
        monkeypatch.setenv("PATH", str(fresh))
    else:
        monkeypatch.setenv("CXX", str(fake_compiler(fresh, does)))
    monkeypatch.setattr(compiled, "SECONDS", 0.1 if fault == "slow" else 60)
    assert path_now() is None
    lines = capfd.readouterr().err.splitlines()
    assert len([line for line in lines if "products are XLA's" in line and reason in line]) == 1, lines
    left = list((fresh / "home").rglob("*.so"))
    assert left == [], "a library that failed stays"


@pytest.fixture(scope="module")
def built():
    """The file of this processor's compiled library, which fake compilers copy."""
    if not PATHS:
        pytest.skip("no path")
    compiled.library(PATHS[0])
    return Path(compiled.library(PATHS[0])._name)  # of the cache


@pytest.mark.parametrize("name", ["attend", "sum_rows"])
def test_the_check_sees_whatever_a_function_leaves_undone(built, name):
    loaded = compiled._opened(built)
    setattr(loaded, f"specdec_{name}", lambda *arguments: None)
    with pytest.raises(ValueError, match="wrong attention" if name == "attend" else "wrong sums"):
        compiled._check(loaded)


def test_a_library_is_kept_and_a_damaged_one_made_again(fresh, built, monkeypatch):
    monkeypatch.setenv("CXX", str(fake_compiler(fresh, f'cp {built} "$last"')))
    compiled.library(PATHS[-1])
    [file] = (fresh / "home").rglob("*.so")
    good, (name, _, _) = file.read_bytes(), file.stem.rpartition("-")
    for damaged in (b"", good[:-1000] + bytes([good[-1000] ^ 4]) + good[-999:], good[: len(good) * 3 // 4]):
        file.unlink()  # a new file: this process has the old one mapped
        file.write_bytes(damaged)
        assert compiled._stored(file.parent, name) is None
    compiled.library(PATHS[-1])
    monkeypatch.setattr(compiled, "cache_folder", lambda name: 1 / 0)  # as if it were read-only
    compiled.library(PATHS[-1])
    assert (fresh / "count").read_text().count("compiled") == 2
    assert {path.name for path in file.parent.iterdir()} == {file.name, f"{name}.so.lock"}


def test_without_a_folder_or_a_faster_path_the_library_is_used_and_both_are_reported(fresh, built, monkeypatch, capfd):
    (fresh / "home").write_text("a file where the home should be")
    monkeypatch.delenv(kernels.VARIABLE)
    monkeypatch.setattr(compiled, "paths_here", lambda: ("amx", PATHS[-1]))
    fails = f'case "$*" in *amx*) echo "x.cc:1: error: none" >&2; exit 1; esac; cp {built} "$last"'
    monkeypatch.setenv("CXX", str(fake_compiler(fresh, fails)))
    REGISTERED.clear()
    assert path_now() == PATHS[-1] and tuple(REGISTERED) == kernels.TARGETS
    err = capfd.readouterr().err
    assert "kept nowhere" in err and re.search(rf"take the path {PATHS[-1]}, slower.*: amx: .*error: none", err)


def test_two_processes_compile_once(fresh, built, monkeypatch):
    monkeypatch.setenv("CXX", str(fake_compiler(fresh, f'cp {built} "$last"')))
    code = f"from specdec_jax.kernels import compiled; compiled.library({PATHS[-1]!r})"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=environment) for _ in range(2)]
    said = [one.communicate()[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert (fresh / "count").read_text().count("compiled") == 1


@pytest.mark.seldom
@needs_path
def test_a_sanitizer_finds_nothing(tmp_path):
    """Every path that this processor has, in a program of its own, under the address and undefined-behaviour ones."""
    for path in PATHS:
        program = tmp_path / path
        flags = [f"-m{name}" for name in compiled.PATHS[path]]
        command = [COMPILER, "-std=c++17", "-O1", "-g", "-w", "-fsanitize=address,undefined", *flags]
        sources = "-include", str(compiled.SOURCE), str(Path(__file__).with_name("sanitized.cc"))
        subprocess.run([*command, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(program)], check=True)
        result = subprocess.run([str(program)], capture_output=True, text=True)
        assert result.returncode == 0 and not result.stderr, (path, result.stderr[:2000])
