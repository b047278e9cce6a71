"""Errors about wrong arguments name the function, the argument and the place, and say what to do.

TypeError for a wrong type or structure, ValueError for a wrong value. One test a message.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from argument_calls import SHAPE
from wrong_calls import CASES, F32, Case, counting, looping, scanning, settings, stay


def check(message: str, case: Case) -> None:
    assert message.startswith(f"loopkit.{case.function}: "), message
    assert re.fullmatch(SHAPE, message), message
    assert re.search(rf"`{case.argument}\b", message), message
    for text in case.says:
        assert re.search(text, message), f"{text!r} not in: {message}"


@pytest.mark.every_case
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_message(case: Case):
    with pytest.raises(case.error) as caught:
        case.call()
    check(str(caught.value), case)


TRANSFORMED = [case for case in CASES if case.name in {"another shape", "predicate with an axis"}]


@pytest.mark.every_case
@pytest.mark.parametrize("case", TRANSFORMED, ids=lambda case: case.name)
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap, jax.grad])
def test_message_under_a_transformation(transform, case: Case):
    def f(x):
        return x + jnp.sum(jax.tree.leaves(case.call())[0])

    with pytest.raises(case.error) as caught:
        transform(f)(jnp.ones(2) if transform is jax.vmap else 1.0)
    check(str(caught.value), case)


def test_the_inner_loop_is_the_one_named():
    inner = lambda c, _: (loopkit.scan(lambda c, x: (c[None], x), c, jnp.ones(2))[0], None)
    with pytest.raises(TypeError, match=r"^loopkit\.scan: `f"):
        loopkit.while_loop(lambda _: True, lambda c: inner(c, None)[0], 1.0, max_steps=2)


def test_errors_of_the_body_are_its_own():
    def body(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loopkit.while_loop(lambda _: True, body, 1.0, max_steps=2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "call",
    [
        looping(stay, F32, lambda x: x < 3),
        settings(checkpoints=0),
        scanning(length=-1),
        scanning(lambda c, _: c),
    ],
)
def test_messages_say_what_to_change(call):
    """The sentence before the values is advice."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    advice = str(caught.value).partition(". Got: ")[0].rsplit(". ", 1)[-1]
    assert len(advice.split()) >= 3, advice


def test_nothing_is_wrong_here():
    """The settings at the edge of what is right."""
    assert settings(max_steps=np.int64(2))() == 2
    assert settings(max_steps=0, checkpoints="all")() == 0
    assert settings(checkpoints=np.int32(1))() == 3
    assert counting(np.int8(0), jnp.int32(3), lambda i, x: x + i)() == 3.0
    assert scanning(length=np.int64(3))()[1] is None


def to_numpy(carry, *_):
    return {"h": np.sin(carry["h"])}, None


def decide(_, x):
    return x, 1 if x > 0 else 0


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("step", "argument"), [(to_numpy, r"init\['h'\]"), (decide, "xs")], ids=["carry", "xs"]
)
def test_errors_of_jax_name_the_step_as_it_is_written(step, argument):
    init = {"h": jnp.ones(3)} if step is to_numpy else 0.0
    line = step.__code__.co_firstlineno
    text = rf"function {step.__name__} at \S+test_errors.py:{line} for scan.*argument {argument}\."
    with pytest.raises(jax.errors.JAXTypeError, match=text):
        loopkit.scan(step, init, jnp.ones(3))
