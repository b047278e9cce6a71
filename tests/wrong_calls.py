"""Calls of loops with wrong arguments, and what the error of each has to say."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import loopkit

F32 = jnp.ones(3, "float32")
I32 = jnp.int32(0)
STRINGS = np.array(["red"])


class Case(NamedTuple):
    name: str
    call: Callable
    error: type[Exception]
    function: str
    argument: str
    says: list[str]


class Particle(eqx.Module):
    position: jax.Array
    name: str = eqx.field(static=True)


def looping(body, init, cond=lambda _: True, **kwargs):
    kwargs = {"max_steps": 3, **kwargs}
    return lambda: loopkit.while_loop(cond, body, init, **kwargs)


def predicating(cond):
    return looping(lambda c: c, F32, cond)


def stay(x):
    return x


def keep(carry, _):
    return carry, None


def settings(**kwargs):
    return lambda: loopkit.while_loop(lambda x: x < 3, lambda x: x + 1, 0, **kwargs)


def scanning(f=keep, init=0.0, xs=None, length=3, **kwargs):
    return lambda: loopkit.scan(f, init, xs, length, **kwargs)


def counting(lower=0, upper=3, body=lambda _, x: x, init=0.0, **kwargs):
    return lambda: loopkit.fori_loop(lower, upper, body, init, **kwargs)


TREE = {"x": (F32, I32)}


def cases(
    error: type[Exception], function: str, argument: str, table: dict[str, tuple]
) -> list[Case]:
    """`table`: what is wrong -> the call, then regular expressions to be found in the message."""
    return [
        Case(name, call, error, function, argument, says) for name, (call, *says) in table.items()
    ]


def traced(call, value):
    """The call, with `value` traced."""
    return lambda: jax.jit(lambda value: call(value)())(value)


# ---------------------------------------------------------------- while_loop

CARRIES = {
    "a list for a tuple": (
        looping(lambda c: {"x": [c["x"][0], c["x"][1]]}, TREE),
        *(r"\['x'\]", "tuple", "list"),
    ),
    "a leaf too many": (
        looping(lambda c: {"x": (*c["x"], 0)}, TREE),
        *(r"\['x'\]", r"\b2\b", r"\b3\b"),
    ),
    "a key too few": (looping(lambda c: {"a": c["a"]}, {"a": F32, "b": F32}), "'b'"),
    "None for a leaf": (
        looping(lambda c: {"x": (c["x"][0], None)}, TREE),
        *(r"\['x'\]\[1\]", "None"),
    ),
    "nothing returned": (looping(lambda c: None, TREE), "dict", "None"),
    "another static field": (
        looping(lambda c: Particle(c.position, "another"), Particle(F32, "one")),
        *("another", "one"),
    ),
    "another shape": (
        looping(lambda c: {"x": (jnp.ones(4, "float32"), c["x"][1])}, TREE),
        *(r"init_val\['x'\]\[0\]", r"float32\[3\]", r"float32\[4\]"),
    ),
    "another rank in a module": (
        looping(lambda c: Particle(c.position[None], c.name), Particle(F32, "one")),
        *(r"init_val\.position", r"float32\[3\]", r"float32\[1,3\]"),
    ),
    "another dtype": (
        looping(lambda c: {"x": (c["x"][0].astype("float16"), c["x"][1])}, TREE),
        *(r"init_val\['x'\]\[0\]", r"float32\[3\]", r"float16\[3\]"),
    ),
    "a float for a strongly typed integer": (
        looping(lambda x: x.astype(float) * 1.5, I32),
        *("init_val", r"int32\[\]", r"float(32|64)\[\]"),
    ),
    "two leaves at once": (
        looping(lambda c: (c[1], c[0]), (F32, I32)),
        *(r"init_val\[0\]", r"init_val\[1\]", r"float32\[3\]", r"int32\[\]"),
    ),
    "a string returned": (
        looping(lambda c: ("red", c[1]), (F32, I32)),
        r"\[0\]",
        "'red'",
        r"float32\[3\]",
    ),
    "body that is no function": (looping(None, F32), "None"),
}

PREDICATES = {
    "predicate with an axis": (predicating(lambda x: x < 3), r"bool\[3\]", r"bool\[\]|scalar"),
    "integer predicate": (predicating(lambda x: jnp.int32(1)), r"int32\[\]", "bool"),
    "float predicate": (predicating(lambda x: x[0]), r"float32\[\]", "bool"),
    "Python integer predicate": (predicating(lambda x: 1), "int", "bool"),
    "predicate in a tuple": (predicating(lambda x: (x[0] < 3,)), "tuple", "bool"),
    "predicate that returns nothing": (predicating(lambda x: None), "None", "bool"),
    "predicate that returns a string": (predicating(lambda x: "yes"), "'yes'", "bool"),
    "predicate that is no function": (looping(stay, F32, True), "True"),
}

INITIAL_VALUES = {
    "a type": (
        looping(stay, {"x": (F32, jax.ShapeDtypeStruct((3,), "int32"))}),
        *(r"init_val\['x'\]\[1\]", r"shape=\(3,\)"),
    ),
    "strings": (looping(stay, [STRINGS]), r"init_val\[0\]", "ndarray"),
    "an array of objects": (looping(stay, np.asarray([None, "a"], dtype=object)), "object"),
}

# ---------------------------------------------------------------- scan and fori_loop

XS = {
    "lengths of xs": (
        scanning(xs={"a": jnp.ones(3), "b": [jnp.ones((4, 2))]}, length=None),
        *(r"\['a'\]", r"\['b'\]\[0\]", r"\b3\b", r"\b4\b"),
    ),
    "xs without an axis": (
        scanning(xs={"a": jnp.ones(3), "b": jnp.asarray(1.0)}, length=None),
        *(r"\['b'\]", r"float(32|64)\[\]", "axis"),
    ),
}

LENGTHS = {
    "length beside xs": (scanning(xs=jnp.ones(3), length=4), r"\b4\b", r"\b3\b"),
    "no length at all": (scanning(length=None), "`xs`"),
    "negative length": (scanning(length=-1), "-1"),
}

LENGTH_TYPES = {
    "half a step": (scanning(length=2.5), r"2\.5", "float"),
    "traced length": (traced(lambda n: scanning(length=n), 3), "int"),
}

STEPS = {
    "no pair": (scanning(lambda c, _: c), "pair|tuple"),
    "three results": (scanning(lambda c, _: (c, None, None)), "pair|tuple", r"\b3\b"),
    "carry of another structure": (scanning(lambda c, _: ([c], None)), "`init`", "list"),
    "carry of another shape": (
        scanning(lambda c, _: ((c[0], c[1][:2]), None), (0.0, F32)),
        *(r"init\[1\]", r"float32\[3\]", r"float32\[2\]"),
    ),
    "carry of another dtype": (
        scanning(lambda c, _: (c.astype("float16"), None), F32),
        *("`init`", r"float32\[3\]", r"float16\[3\]"),
    ),
    "strings in y": (scanning(lambda c, _: (c, {"y": STRINGS})), r"\['y'\]", "ndarray"),
    "f that is no function": (scanning(3), r"\b3\b"),
}

UNTILS = {
    "until with an axis": (
        scanning(lambda c, _: (c, None), F32, until=lambda c, _: c > 0),
        *(r"bool\[3\]", r"bool\[\]|scalar"),
    ),
    "integer until": (scanning(until=lambda *_: jnp.int32(1)), r"int32\[\]", "bool"),
    "until that returns nothing": (scanning(until=lambda *_: None), "None", "bool"),
    "until in a tuple": (scanning(until=lambda c, _: (c > 0,)), "tuple", "bool"),
    "until that is no function": (scanning(until=True), "True"),
}

COUNTED = {
    "counted carry of another shape": (
        counting(body=lambda _, x: x[:2], init=F32),
        *("`init_val`", r"float32\[3\]", r"float32\[2\]"),
    ),
    "counted carry of another shape, bound traced": (
        traced(lambda n: counting(0, n, lambda _, x: {"x": x["x"][:2]}, {"x": F32}), 3),
        *(r"`init_val\['x'\]`", r"float32\[3\]", r"float32\[2\]"),
    ),
    "counted carry of another structure": (
        counting(body=lambda i, x: (i, x)),
        *("`init_val`", "tuple"),
    ),
    "counted body that is no function": (counting(body=3), r"\b3\b"),
}

UPPERS = {
    "float bound": (counting(upper=3.0), r"3\.0", "int"),
    "traced float bound": (traced(lambda n: counting(upper=n), 3.0), r"float(32|64)\[\]", "int"),
    "bound with an axis": (counting(upper=jnp.arange(3)), r"int64\[3\]"),
    "unsigned after a negative": (
        traced(lambda n: counting(lower=-2, upper=n), jnp.uint8(3)),
        *("`lower` and `upper` must fit in one integer type", "-2", r"uint8\[\]"),
    ),
    "unsigned after signed": (
        traced(lambda n: counting(lower=n, upper=n.astype("uint8")), jnp.int32(3)),
        *("`lower` and `upper` must fit in one integer type", r"int32\[\] and uint8\[\]"),
    ),
}

# ---------------------------------------------------------------- settings that the loops share


def whole_numbers(function: str, call: Callable) -> list[Case]:
    """`checkpoints` and `unroll`."""
    name = lambda table: {f"{function}: {key}": value for key, value in table.items()}
    values = {
        "no checkpoints": (call(checkpoints=0), r"\b0\b", "1"),
        "negative checkpoints": (call(checkpoints=-2), "-2"),
        "unknown word for checkpoints": (call(checkpoints="some"), "'some'", "[\"']all[\"']"),
    }
    types = {
        "half a checkpoint": (call(checkpoints=1.5), r"1\.5", "float", "int"),
        "a bool for checkpoints": (call(checkpoints=True), "True", "bool"),
    }
    return [
        *cases(ValueError, function, "checkpoints", name(values)),
        *cases(TypeError, function, "checkpoints", name(types)),
        *cases(ValueError, function, "unroll", name({"negative": (call(unroll=-1), "-1")})),
        *cases(TypeError, function, "unroll", name({"half": (call(unroll=1.5), r"1\.5", "float")})),
    ]


def bounds(function: str, call: Callable) -> list[Case]:
    """`max_steps`."""
    types = {
        "bound that is a float": (call(max_steps=3.0), r"3\.0", "float", "int"),
        "bound that is a bool": (call(max_steps=True), "True", "bool", "int"),
        "bound that is a string": (call(max_steps="3"), "'3'", "str"),
        "bound that is traced": (traced(lambda n: call(max_steps=n), 3), "int"),
    }
    types = {f"{function}: {key}": value for key, value in types.items()}
    negative = {f"{function}: negative bound": (call(max_steps=-1), "-1")}
    return [
        *cases(TypeError, function, "max_steps", types),
        *cases(ValueError, function, "max_steps", negative),
    ]


endless = lambda: loopkit.while_loop(lambda x: x < 3.0, lambda x: 2 * x, 1.0, checkpoints="all")
UNBOUNDED = {"all without a bound": (endless, "all", "`max_steps`")}

CASES = [
    *cases(TypeError, "while_loop", "body_fun", CARRIES),
    *cases(TypeError, "while_loop", "cond_fun", PREDICATES),
    *cases(TypeError, "while_loop", "init_val", INITIAL_VALUES),
    *cases(ValueError, "while_loop", "checkpoints", UNBOUNDED),
    *cases(ValueError, "while_loop", "unroll", {"no unroll": (settings(unroll=0), r"\b0\b")}),
    *cases(TypeError, "while_loop", "unroll", {"unroll all": (settings(unroll=True), "True")}),
    *whole_numbers("while_loop", settings),
    *bounds("while_loop", settings),
    *cases(
        TypeError,
        "scan",
        "init",
        {"strings to begin with": (scanning(init={"h": STRINGS}), r"init\['h'\]", "ndarray")},
    ),
    *cases(ValueError, "scan", "xs", XS),
    *cases(
        TypeError,
        "scan",
        "xs",
        {"strings in xs": (scanning(xs=[jnp.ones(3), STRINGS], length=None), r"\[1\]", "ndarray")},
    ),
    *cases(ValueError, "scan", "length", LENGTHS),
    *cases(TypeError, "scan", "length", LENGTH_TYPES),
    *cases(TypeError, "scan", "f", STEPS),
    *cases(TypeError, "scan", "until", UNTILS),
    *cases(
        ValueError, "scan", "reduce", {"no such sum": (scanning(reduce="max"), "'max'", "mean")}
    ),
    *whole_numbers("scan", scanning),
    *cases(TypeError, "fori_loop", "body_fun", COUNTED),
    *cases(TypeError, "fori_loop", "upper", UPPERS),
    *cases(TypeError, "fori_loop", "lower", {"float start": (counting(lower=0.5), r"0\.5", "int")}),
    *cases(
        TypeError,
        "fori_loop",
        "init_val",
        {"strings to count on": (counting(init=[0.0, STRINGS]), r"init_val\[1\]", "ndarray")},
    ),
    *whole_numbers("fori_loop", counting),
    *bounds("fori_loop", counting),
]
