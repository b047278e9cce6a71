"""The value of every loop is that of the Python loop, whatever is to be kept for a gradient."""

import jax
import pytest

from derivatives import assert_close, in_numpy
from problems import CHECKPOINTS, PROBLEMS, Problem, tagged


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_value(problem: Problem):
    wanted = in_numpy(problem.reference(), *problem.args)
    assert_close(problem.loop()(*problem.args), wanted)
    assert_close(jax.jit(problem.loop())(*problem.args), wanted)


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoints", CHECKPOINTS[1:])
@pytest.mark.parametrize("problem", tagged("core"), ids=lambda problem: problem.name)
def test_value_with_checkpoints(problem: Problem, checkpoints):
    wanted = in_numpy(problem.reference(), *problem.args)
    assert_close(problem.loop(checkpoints)(*problem.args), wanted)
