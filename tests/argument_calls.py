"""Every public function, called with what is given and otherwise as it should be."""

import re

import jax
import jax.numpy as jnp
import pytest

import loopkit

X = jnp.arange(3.0)


SEQUENCES = [jnp.ones(2), jnp.ones(5)]


def step(carry, _):
    return carry, carry


def scan(**how):
    return loopkit.scan(step, 1.0, X, **how)


def steps(**how):
    return loopkit.scan(step, 1.0, None, **{"length": 3, **how})


def while_loop(**how):
    return loopkit.while_loop(lambda x: x < 3, lambda x: x + 1, 0.0, **{"max_steps": 9, **how})


def fori_loop(**how):
    return loopkit.fori_loop(0, 3, lambda _, x: x, 1.0, **how)


def fori_loop_to(**how):
    return jax.jit(lambda n: loopkit.fori_loop(0, n, lambda _, x: x, 1.0, **how))(3)


def unbounded_scan(**how):
    given = {"f": lambda c, _: (c + 1, c), "init": 0.0, "until": lambda c, _: c > 3}
    return loopkit.unbounded_scan(**{**given, **how})


def ragged_scan(**how):
    return loopkit.ragged_scan(**{"f": step, "init": 1.0, "sequences": SEQUENCES, **how})


def blocked(**how):
    return loopkit.blocked(lambda x: x * 2, **how)(X)


def best_unroll(**how):
    return loopkit.best_unroll(step, 1.0, **{"length": 3, "uses": 1, **how})


def checkpointed(**how):
    return loopkit.checkpointed(lambda x: x * 2, **how)(1.0)


def replace_lax_loops(**how):
    with loopkit.replace_lax_loops(**how):
        return None


def in_place_report(**how):
    return loopkit.in_place_report(jnp.sin, X, **how)


def plan(**how):
    return loopkit.Plan(**{"slots": 2, **how})


def evaluations(**how):
    return loopkit.Plan(2).evaluations(**how)


def length_buckets(**how):
    return loopkit.length_buckets(**{"lengths": [3, 4], **how})


def empty(**how):
    return loopkit.TensorArray.empty(**{"capacity": 3, "element": 1.0, **how})


def set_to(**how):
    return loopkit.Buffer(X).at[0].set(1.0, **how)


def get(**how):
    return loopkit.Buffer(X).at[0].get(**how)


ALL_LOOPS = scan, while_loop, fori_loop, fori_loop_to


REPLACING = checkpointed, replace_lax_loops


REPORTING = (in_place_report,)


NAMES = {
    steps: "scan",
    fori_loop_to: "fori_loop",
    plan: "Plan",
    evaluations: "Plan.evaluations",
    empty: "TensorArray.empty",
    set_to: "Buffer.at[...].set",
    get: "Buffer.at[...].get",
}


SHAPE = r"(?s)loopkit[\w.\[\]]*: .+?\. .+?\. Got:( .+\.|(\n  [^\n]+)+)"
"""The shape of every message: what is wrong, what to do, and the values."""


def refused(call, argument, value, *errors):
    name = NAMES.get(call, call.__name__)
    with pytest.raises(errors or (TypeError, ValueError)) as caught:
        call(**{argument: value})
    message = str(caught.value)
    assert re.match(rf"loopkit\.{re.escape(name)}: `{argument}", message), message
    assert re.fullmatch(SHAPE, message), message


def by_name(case):
    return "-".join(getattr(v, "__name__", str(v)) for v in case)
