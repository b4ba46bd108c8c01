"""Strict jax settings for every test, the persistent compilation cache, and the real models."""

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import jax
import pytest

from specdec_jax import compilation_cache, kernels
from specdec_jax.costs import choices
from specdec_jax.decoding import decoder
from specdec_jax.text import pair
from tools.mutations import BUGS

# A silent broadcast of [B] against [B, V], or a float64 from a Python number, is a bug that still gives numbers.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
compilation_cache.enable()  # a second run of the tests compiles little
os.environ["SPECDEC_JAX_COSTS"] = "estimated"  # tests measure nothing but where measuring is what they test


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive():
    """A shell starts what runs in its background with SIGINT ignored, and Python leaves that alone."""
    kernels.path()  # compiled here, not by a test, which would see the compiler's line
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped():
    """Every compiled program holds a few memory maps, of which a process may have 65,530 on Linux: two thousand tests
    in one process came to the end of them, and XLA crashed. What is needed again comes from the cache on disk.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or len(maps.read_bytes().splitlines()) > 25_000:
        jax.clear_caches()


@pytest.fixture
def exact_products():
    """Matrix products in full float32 where an accelerator would round their inputs."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """(target, drafter) of `tiny_pair.write_pair`, for all tests that only read them."""
    from tiny_pair import write_pair

    return write_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def models(tiny_folders):
    """The same as options of a command."""
    return ["--target", tiny_folders[0], "--drafter", tiny_folders[1]]


@pytest.fixture(scope="session")
def tiny(tiny_folders):
    """The same as a pair in float32 that verifies drafts of three tokens in one width."""
    from specdec_jax.stopping import static
    from specdec_jax.text.generation import build_pair

    options = {"max_draft_length": 3, "verification_widths": (4,), "dtype": "float32"}
    return build_pair(*tiny_folders, policy=static(draft_length=3), **options)


@pytest.fixture
def stored():
    """Compares a text with the file tests/data/outputs/NAME; with STORE=yes in the environment it is written.

    Numbers may be apart by so many `units` of their last digit.
    """

    def check(name, text, units=0.0):
        path, number = Path(__file__).parent / "data" / "outputs" / name, re.compile(r"\d+(?:\.\d+)?")
        if os.environ.get("STORE"):
            path.write_text(text, encoding="utf-8")
        wanted = path.read_text(encoding="utf-8")
        assert number.sub("0", text) == number.sub("0", wanted) if units else text == wanted
        for ours, theirs in zip(number.findall(text), number.findall(wanted), strict=True):
            assert abs(float(ours) - float(theirs)) <= units * 10.0 ** -len(theirs.partition(".")[2]), (ours, theirs)

    return check


RECORD, RECORDED = Path(__file__).parent / "seconds.json", 1.0  # processor seconds, nothing compiled before, of tests
KNOWN = json.loads(RECORD.read_text(encoding="utf-8"))
LONG = 3.0  # of tests that `make test` leaves out; `make check` leaves out all that are recorded
SECONDS = {}  # of this run
SHARED, SHARERS = Counter(), Counter()  # processor seconds of a module's fixture, and the tests that have it
COLLECTED = set()  # tests, also those that options leave out


@pytest.fixture
def stale():
    """Tests that `seconds.json` names and that were not collected."""
    return sorted(KNOWN.keys() - COLLECTED)


def pytest_addoption(parser):
    parser.addoption("--record-seconds", action="store_true", help=f"write the tests that ran into {RECORD.name}")


REAL, WIDTHS = {"smollm2", "smollm2_float32", "smollm2_drafter"}, decoder.default_widths


def pytest_collection_modifyitems(items):
    """Marks tests by their processor seconds in `seconds.json`; what reads real weights is slow, and optimised.

    Of `often(n)` tests all but the first n cases are seldom. Of each function that `tools/mutations.py` names the two
    quickest cases are never long, nor is a case that it names, nor what has the mark `essential`.
    """
    seconds = {item.nodeid: KNOWN.get(item.nodeid, 0.0) for item in items}
    COLLECTED.update(seconds)
    cases, quickest = Counter(), Counter()
    named = {test for bug in BUGS for test in bug.tests.split()}
    for item in items:
        often, test = item.get_closest_marker("often"), item.nodeid.split("[")[0]
        cases[test] += 1
        if often is not None and cases[test] > often.args[0]:
            item.add_marker(pytest.mark.seldom)
        SHARERS.update(shared_fixtures(item) if item.get_closest_marker("seldom") is None else ())
    for item in sorted(items, key=lambda item: seconds[item.nodeid]):
        test, is_real = item.nodeid.split("[")[0], bool(REAL & set(getattr(item, "fixturenames", ())))
        is_named = not {test, item.nodeid}.isdisjoint(named) and item.get_closest_marker("seldom") is None
        quickest[test] += is_named
        if is_real:
            item.add_marker(pytest.mark.optimised)
        if is_real or item.nodeid in KNOWN:
            item.add_marker(pytest.mark.slow)
        is_needed = (is_named and quickest[test] <= 2) or item.get_closest_marker("essential") is not None
        if seconds[item.nodeid] > LONG and not is_needed:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.get_closest_marker("optimised") is not None)  # caches are cleared before them


def pytest_runtest_setup(item):
    """Tiny models run as fast without LLVM's optimisations, and their programs compile in two thirds of the time.

    What is to be optimised is compiled again where models of other tests share the program. Tiny decoders verify in one
    width unless a test has the mark `widths`: each is another target pass to compile.
    """
    optimised = item.get_closest_marker("optimised") is not None
    widths = WIDTHS if optimised or item.get_closest_marker("widths") else lambda most: (most + 1,)
    for module in (decoder, choices, pair):
        module.default_widths = widths
    if optimised and jax.config.read("jax_disable_most_optimizations"):
        jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", not optimised)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)  # commands set it to that of users
    item.user_properties.append(("began", own_seconds()))


def own_seconds():
    """Processor seconds of this process and its children, which other work on the machine does not lengthen.

    Less those of fixtures that tests of a module, or of a session, share.
    """
    return sum(os.times()[:4]) - sum(SHARED.values())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    began = sum(os.times()[:4])
    value = yield
    if fixturedef.scope != "function":
        SHARED[request.node.nodeid, fixturedef.argname] += sum(os.times()[:4]) - began
    return value


def shared_fixtures(item):
    return [(item.nodeid.split("::")[0], name) for name in item.fixturenames]


def pytest_runtest_teardown(item):
    """A test's seconds have its share of what its module's tests share: were it left out, the next would pay for it."""
    if (began := dict(item.user_properties).get("began")) is not None:  # None: a mark skipped it before it was set up
        share = sum(SHARED[each] / max(SHARERS[each], 1) for each in shared_fixtures(item))
        item.user_properties.append(("seconds", own_seconds() - began + share))


def pytest_runtest_logreport(report):
    if report.when == "teardown" and (seconds := dict(report.user_properties).get("seconds")) is not None:
        SECONDS[report.nodeid] = round(seconds, 1)


def unrecorded(limit):
    """Tests of more seconds that `seconds.json` does not have; on a slower machine there are more."""
    return [f"{seconds} {test}" for test, seconds in SECONDS.items() if seconds > limit and test not in KNOWN]


def pytest_terminal_summary(terminalreporter):
    if new := unrecorded(LONG):
        terminalreporter.section(f"over {LONG:g} processor seconds and not in {RECORD.name}")
        advice = f"over {10 * LONG:g} CI fails: make the test quicker, or record it (make test ARGS=--record-seconds)"
        terminalreporter.write_line("\n".join([*new, advice]))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        return
    if os.environ.get("CI") and session.config.option.markexpr != "seldom" and unrecorded(10 * LONG):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    if session.config.getoption("--record-seconds"):
        recorded = {test: seconds for test, seconds in (KNOWN | SECONDS).items() if seconds >= RECORDED}
        RECORD.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def built_in(source: str, dtype: str):
    """A fixture: the model, or a skip where its weights are not installed; in CI that is a failure."""

    @pytest.fixture(scope="session")
    def loaded():
        from specdec_jax.loading import load_model

        try:
            return load_model(source, dtype=dtype)
        except FileNotFoundError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the weights are not installed: {error}")

    return loaded


smollm2, smollm2_drafter = built_in("smollm2", "bfloat16"), built_in("smollm2-drafter", "bfloat16")  # as users run them
smollm2_float32 = built_in("smollm2", "float32")  # for claims of exactness
