"""The plugin that runs the tests of other projects inside `replace_lax_loops`."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

SUITE = """
    import sys

    IMPORTED_EARLY = "loopkit" in sys.modules

    import jax
    import pytest

    def doubled(x):
        return jax.lax.while_loop(lambda x: x < 9.0, lambda x: 2 * x, x)

    @pytest.fixture
    def slope():
        return jax.grad(doubled)

    def test_value():
        assert jax.jit(doubled)(1.0) == 16.0

    def test_gradient(slope):
        assert slope(1.0) == 16.0

    def test_no_gradient():
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(doubled)(1.0)

    def test_no_loop():
        assert not IMPORTED_EARLY
"""


@pytest.fixture
def run(pytester):
    """Runs the suite in a process of its own, where nothing is imported yet."""

    def run(*options):
        pytester.makepyfile(SUITE)
        return pytester.runpytest_subprocess("-p", "pytest_loopkit", "-v", *options)

    return run


def test_loaded_it_changes_nothing(run):
    result = run("-p", "no:xdist")
    result.assert_outcomes(passed=3, failed=1)
    why = "E *Reverse-mode differentiation does not work*"
    result.stdout.fnmatch_lines([why, "FAILED *test_gradient*"])
    result.stdout.no_fnmatch_line("loopkit replaced*")


@pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n", "1"]], ids=["alone", "xdist"])
def test_asked_to_it_replaces_the_loops_of_each_test(run, workers):
    result = run("--loopkit-replaces", *workers)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["loopkit replaced 3 loops of lax, in 3 of 4 tests", "FAILED *test_no_gradient*"]
    )
