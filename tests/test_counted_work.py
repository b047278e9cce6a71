"""Counts of benchmarks/: the rounds of loops, and the launches and waits of a GPU."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import iterations
import loopkit
import thunks
from ahead_of_time import Compiled


def counted(function, *arguments):
    """Count the runs of each loop and branch, in the order of their numbers."""
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    module = lowered.compiler_ir("stablehlo")
    count = iterations.number(module)
    return iterations.counts(module, count, arguments).tolist()


def below(n, x):
    """`x` counted up to `n`."""
    return lax.while_loop(lambda x: x < n, lambda x: x + 1, x)


def test_loops_in_loops():
    def triangle(n):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, below(c[0], 0)), (0, 0))

    assert counted(triangle, 5) == [5, 0 + 1 + 2 + 3 + 4]


def test_branches():
    def odd_or_even(n):
        step = lambda c, i: (lax.cond(i % 3 == 0, lambda c: c + 1, lambda c: below(i, c), c), None)
        return lax.scan(step, n * 0, jnp.arange(10))[0]

    # The first branch is that of what is false; the loop in it begins at what was counted.
    rounds = value = 0
    for i in range(10):
        rounds += max(i - value, 0) if i % 3 else 0
        value = max(value, i) if i % 3 else value + 1
    assert counted(odd_or_even, 0) == [10, 6, 4, rounds]


def test_a_function_that_is_called_twice_counts_for_both():
    inner = jax.jit(below)
    assert counted(lambda n: inner(n, 0) + inner(2 * n, 0), 7) == [7 + 14]


def test_attributes_that_were_there_stay():
    with set_xla_metadata(mine="yes"):
        lowered = jax.jit(lambda n: below(n, 0)).lower(3)
    module = lowered.compiler_ir("stablehlo")
    assert iterations.number(module) == 1
    assert 'counted = "0"' in str(module)
    assert 'mine = "yes"' in str(module)


# A compiler writes it like this, and calls the true branch false.
SEQUENCE = """\
000: kCommandBuffer [source       | next=008 (1)]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kCustomKernel [source       | sink        ] loop_broadcast_fusion
003: kWhile         [prev=000 (1) | next=013 (1)]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    005: kAsyncStart   [source       | next=009 (3)] stream=computation_stream[0]
        006: kDynamicSliceFusion [source | sink] params=1, results=1
            007: kCopy [source | sink] kCopy
    008: kAsyncDone    [source       | sink        ] async_id=5
    009: kWhile         [prev=005 (1) | next=012 (1)]
condition:
        010: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1]
      body:
        011: kCustomKernel [source       | sink        ] loop_add_fusion
    012: kCustomKernel  [prev=009 (1) | sink        ] wrapped_add
    013: kConditional  [prev=012 (1) | next=016 (1)]
      false_branch:
        014: kCustomKernel [source       | sink        ] second_1
        015: kCopy         [source       | sink        ] second_2
      true_branch:
        016: kCustomKernel [source       | sink        ] first
017: kCustomKernel  [prev=003 (1) | sink        ] loop_multiply_fusion
"""
PROGRAM = """\
HloModule test

%first_computation (p: f32[]) -> f32[] {
  ROOT %first = f32[] fusion(%p), kind=kLoop, calls=%f, metadata={op_name="a/cond/branch_0_fun/mul"}
}

%second_computation (p: f32[]) -> f32[] {
  %second.1 = f32[] fusion(%p), kind=kLoop, calls=%g, metadata={op_name="a/cond/branch_1_fun/add"}
  ROOT %second.2 = f32[] copy(%second.1)
}

ENTRY %main (p: f32[]) -> f32[] {
  %while.1 = (s32[]) while(%t), condition=%c1, body=%b1, frontend_attributes={counted="0"}KNOWN
  %while.2 = (s32[]) while(%t), condition=%c2, body=%b2, frontend_attributes={counted="1"}
  %cond.1 = f32[] conditional(%i, %p, %p), true_computation=%second_computation, \
false_computation=%first_computation, frontend_attributes={counted="2"}, metadata={op_name="a/cond"}
  ROOT %end = f32[] fusion(%cond.1), kind=kLoop, calls=%h
}
"""
NAMES = {3: "while.1", 9: "while.2", 13: "cond.1", 14: "second.1", 15: "second.2", 16: "first"}


@pytest.mark.parametrize("known", [False, True])
def test_kernels_launches_and_waits(known):
    """Count 10 rounds with 50 inside in all, one branch taken 4 times and one 6 times."""
    trips = ', backend_config={"known_trip_count":{"n":"10"}}' if known else ""
    program = Compiled("gpu", PROGRAM.replace("KNOWN", trips), 0, 0, 0.0, SEQUENCE, NAMES, None, 4)
    # Before and after: a graph of 2, and 1. A round: a copy, a kernel. The inner loop: a kernel
    # each of 50 rounds, and a question each of 50 + 10 times. Branches: 4 * 1 + 6 * 2.
    kernels, waits = 2 + 1 + 10 * 2 + 50 + 60 + 4 * 1 + 6 * 2, 60 + 10
    if not known:  # and a question for each of 10 rounds, and at the end
        kernels, waits = kernels + 11, waits + 11
    launches = kernels - 1
    assert thunks.work(program, [10, 50, 4, 6]) == (kernels, launches, waits)


def test_counts_that_contradict_the_compiler():
    trips = ', backend_config={"known_trip_count":{"n":"10"}}'
    program = Compiled("gpu", PROGRAM.replace("KNOWN", trips), 0, 0, 0.0, SEQUENCE, NAMES, None, 4)
    with pytest.raises(ValueError, match=r"while\.1.*entered 1 times, went round 9 times"):
        thunks.work(program, [9, 50, 4, 6])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [None, 3, "all"])
def test_forward_over_reverse_runs_as_often_as_a_gradient(checkpoints):
    """Steps and their tangents run together, forward and backward."""

    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(w * h + x), h * h)
        h, ys = loopkit.scan(step, w, xs, checkpoints=checkpoints)
        return jnp.sum(h) + jnp.sum(ys)

    gradient = jax.value_and_grad(loss)
    along = lambda w, xs: jax.jvp(lambda w: gradient(w, xs), (w,), (w + 1,))
    given = jnp.linspace(0.1, 0.4, 300), jnp.linspace(0.0, 1.0, 40)
    assert counted(along, *given) == counted(gradient, *given)


def test_a_hessian_takes_all_tangents_along_one_gradient():
    loss = lambda x: jnp.sum(
        loopkit.while_loop(lambda x: x[0] < 9, lambda x: x * x[::-1] + 1, x, max_steps=30)
    )
    x = jnp.linspace(0.1, 0.3, 3)
    assert sum(counted(jax.hessian(loss), x)) == sum(counted(jax.grad(loss), x))
