"""Double precision, strict promotion, four host devices, and a count of what XLA compiles.

XLA's passes are those of any program, and so are the HLO and the memory that tests read; LLVM is
told not to optimise what comes out, which takes a quarter of the time to compile.
`JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` has it optimise.

By default, lanes narrow only where JAX has a single device, as most users have:
`XLA_FLAGS=--xla_force_host_platform_device_count=1 pytest` runs loops as they run there.
"""

import gc
import os
from pathlib import Path

DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in (flags := os.environ.get("XLA_FLAGS", "")):
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICES}=4".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import pytest  # noqa: E402
from jax._src import dispatch  # noqa: E402

from turns import take_turns  # noqa: E402

HERE = Path(__file__).parent

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    """Add the options of the random programs in `trials/`."""
    parser.addoption("--loops", default="loopkit", help="loopkit, checkpointed, lax or equinox")
    parser.addoption("--trials", default=5000, type=int, help="how many programs")
    parser.addoption("--trials-seed", default=1000, type=int, help="of the first piece")
    parser.addoption("--trials-longest", default=None, type=int, help="characters of a program")
    parser.addoption("--trials-record", default=None, help="a file: pieces that it has are done")


def pytest_ignore_collect(collection_path, config):
    """Import no file of a folder all of whose tests `-m` leaves out."""
    if collection_path.parent == HERE and collection_path.name in ("accelerators", "programs"):
        return f"not {collection_path.name}" in config.option.markexpr or None
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """Leave exhaustive cases out, unless `-m` names them or chooses nothing."""
    take_turns(items)
    if config.option.markexpr and "exhaustive" not in config.option.markexpr:
        late = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip what takes a derivative of a scan of lax, or lanes of one, where it has none yet."""
    try:
        return (yield)
    except NotImplementedError as error:
        if getattr(jax.config, "jax_scan3", False) and "Scan3" in str(error):
            pytest.skip("lax.scan has neither gradient nor vmap under jax_scan3")
        raise


def pytest_collection_finish():
    """Leave what was imported out of garbage collections, and collect more seldom.

    JAX makes millions of objects, few of them in cycles: collections took a twentieth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


STANDARD = {
    "programs": "Other people's code may rely on it.",
    "test_beam_search.py": "Examples are written for it.",
    "test_decoding.py": "Examples are written for it.",
    "test_options.py": "Programs mix types.",
    "test_third_party.py": "Other people's code may rely on it.",
    "test_types.py": "Examples are written for it.",
    "test_weak_types.py": "They test which type two types are promoted to.",
    "trials": "Random programs mix types.",
}
"""Files and folders of tests that run under JAX's standard promotion of types, and why."""


@pytest.fixture(autouse=True, scope="module")
def _promotion(request):
    standard = STANDARD.keys() & set(request.path.relative_to(HERE).parts)
    with jax.numpy_dtype_promotion("standard" if standard else "strict"):
        yield


@pytest.fixture(autouse=True)
def _errors_stay():
    """JAX tells what failed on a device at the next barrier, of whichever test, and again then."""
    yield
    try:
        jax.effects_barrier()
    except Exception:
        dispatch.runtime_tokens.clear()


@pytest.fixture
def compilations():
    """A list that grows by one with every program that XLA compiles."""
    events = []

    def listener(event: str, duration: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)
