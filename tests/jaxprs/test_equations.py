"""Reading and rewriting jaxprs: what is evaluated, changed, found; and what stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopkit
from loopkit import _jax
from loopkit._buffers.slices import read
from loopkit._buffers.window import Window
from loopkit._engine.passes.varying import all_varying
from loopkit._jaxprs import equations
from loopkit._jaxprs.dataflow import interpret

FLOAT = _jax.ShapedArray((), jnp.dtype("float64"))
ROWS = _jax.ShapedArray((4, 2), jnp.dtype("float64"))
ROW = Window((0,), (0, 0), (1, 2), "clip")


def traced(fun, *types):
    return _jax.trace_closed(lambda *values: list(fun(*values)), types, "program")


def names(jaxpr):
    return [eqn.primitive.name for eqn in _jax.open_jaxpr(jaxpr).eqns]


def all_names(jaxpr):
    return [eqn.primitive.name for eqn in equations.all_equations(jaxpr)]


def nested(x, y):
    """Equations in a call, in branches, in loops of lax and of loopkit."""
    inner = jax.jit(lambda x: jnp.sin(x) * 2.0)
    x = inner(x) + inner(y)
    x = lax.cond(x > 0, lambda x: jnp.cos(x), lambda x: -x, x)
    x = lax.while_loop(lambda x: x < 3.0, lambda x: jnp.exp(x), x)
    x = loopkit.while_loop(lambda x: x < 9.0, lambda x: x + jnp.tanh(y), x)
    x, ys = lax.scan(lambda x, _: (jnp.log(x), x), x, length=2)
    return x, y, ys


# ---------------------------------------------------------------- interpret


def test_the_rule_makes_the_results():
    def program(x, y):
        a, b = jnp.split(jnp.stack([x, y]), 2)
        return a + b, x, 3.0, a

    jaxpr = traced(program, FLOAT, FLOAT)
    seen = []

    def rule(eqn, ins):
        seen.append(eqn.primitive.name)
        return _jax.bind_equation(eqn, ins)

    got = interpret(_jax.open_jaxpr(jaxpr), [2.0, 5.0], rule)
    assert seen == names(jaxpr)
    assert [np.asarray(v).tolist() for v in got] == [[7.0], 2.0, 3.0, [2.0]]


def test_values_may_be_anything():
    jaxpr = traced(lambda x, y: [(x + y) * x - 2.0], FLOAT, FLOAT)
    write = lambda eqn, ins: [f"{eqn.primitive.name}({', '.join(map(str, ins))})"]
    (got,) = interpret(_jax.open_jaxpr(jaxpr), ["x", "y"], write)
    assert got == "sub(mul(add(x, y), x), 2.0)"


def test_constants_come_first():
    j = _jax.open_jaxpr(traced(lambda x, y: [x - y], FLOAT, FLOAT))
    j = j.replace(constvars=j.invars[:1], invars=j.invars[1:])
    assert interpret(j, [7, 2], lambda eqn, ins: [ins[0] - ins[1]]) == [5]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("values", "results"), [([1.0], 1), ([1.0, 2.0, 3.0], 1), ([1.0, 2.0], 0), ([1.0, 2.0], 2)]
)
def test_counts_have_to_fit(values, results):
    j = _jax.open_jaxpr(traced(lambda x, y: [x - y], FLOAT, FLOAT))
    with pytest.raises(ValueError, match="zip"):
        interpret(j, values, lambda *_: [0.0] * results)


# ---------------------------------------------------------------- map_equations


def test_what_does_not_change_is_the_same_object():
    jaxpr = traced(nested, FLOAT, FLOAT)
    assert equations.map_equations(jaxpr, lambda eqn: eqn) is jaxpr


def test_a_change_leaves_what_is_beside_it():
    jaxpr = traced(nested, FLOAT, FLOAT)

    def change(eqn):
        return eqn.replace(primitive=lax.sin_p) if eqn.primitive is lax.tanh_p else eqn

    new = equations.map_equations(jaxpr, change)
    same = [a is b for a, b in zip(jaxpr.eqns, new.eqns, strict=True)]
    changed = [eqn.primitive.name for eqn, s in zip(new.eqns, same, strict=True) if not s]
    assert changed == ["loopkit_while"]
    wanted = ["sin" if name == "tanh" else name for name in all_names(jaxpr)]
    assert all_names(new) == wanted
    assert "tanh" in all_names(jaxpr)


def test_inner_equations_come_first():
    jaxpr = traced(nested, FLOAT, FLOAT)
    seen = []
    equations.map_equations(jaxpr, lambda eqn: seen.append(eqn.primitive.name) or eqn)
    for outer, inner in [("while", "exp"), ("cond", "cos"), ("scan", "log"), ("jit", "mul")]:
        assert seen.index(inner) < seen.index(outer)


def test_none_leaves_an_equation_out():
    def program(x, y):
        jax.debug.print("x {}", x)
        inner = jax.jit(lambda x: [jax.debug.print("inner {}", x), x * 2.0][1])
        return [inner(x) + y]

    jaxpr = traced(program, FLOAT, FLOAT)
    assert jaxpr.effects
    quiet = equations.without_debug_effects(jaxpr)
    assert len(names(quiet)) == len(names(jaxpr)) - 1
    assert not any("debug" in name for name in all_names(quiet))
    assert not quiet.effects
    assert not any(eqn.effects for eqn in equations.all_equations(quiet))
    assert equations.without_debug_effects(quiet) is quiet
    assert float(_jax.call_jaxpr(quiet)(3.0, 1.0)[0]) == 7.0


def test_what_is_shared_stays_shared():
    inner = jax.jit(lambda x: jnp.sin(x))
    jaxpr = traced(lambda x, y: [inner(x) + inner(y)], FLOAT, FLOAT)
    asked = []

    def change(eqn):
        asked.append(eqn.primitive.name)
        return eqn.replace(primitive=lax.cos_p) if eqn.primitive is lax.sin_p else eqn

    new = equations.map_equations(jaxpr, change)
    calls = [eqn.params["jaxpr"] for eqn in new.eqns if equations.is_call(eqn)]
    assert len(calls) == 2
    assert calls[0] is calls[1]
    assert asked.count("sin") == 1


# ---------------------------------------------------------------- all_equations


def test_equations_are_found_wherever_they_are():
    found = all_names(traced(nested, FLOAT, FLOAT))
    counts = {"sin": 2, "cos": 1, "neg": 1, "exp": 1, "tanh": 1, "log": 1, "jit": 2, "scan": 1}
    assert {name: found.count(name) for name in counts} == counts
    assert {"while", "cond", "loopkit_while"} <= set(found)


def test_calls_and_loops_are_told_apart():
    jaxpr = traced(nested, FLOAT, FLOAT)
    calls = [eqn.primitive.name for eqn in jaxpr.eqns if equations.is_call(eqn)]
    assert calls == ["jit", "jit"]
    assert equations.holds_while_loop(jaxpr)
    scan = traced(lambda x: loopkit.scan(lambda x, _: (-x, x), x, length=2), FLOAT)
    assert not equations.holds_while_loop(scan)
    inside = traced(
        lambda x: [lax.scan(lambda x, _: (nested(x, x)[0], 0.0), x, length=2)[0]], FLOAT
    )
    assert equations.holds_while_loop(inside)


def test_custom_vjps_are_found_inside():
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * x,))
    assert equations.holds_custom_vjp(traced(lambda x: [f(x)], FLOAT))
    assert equations.holds_custom_vjp(traced(lambda x: [jax.jit(lambda x: 2.0 * f(x))(x)], FLOAT))
    assert not equations.holds_custom_vjp(traced(nested, FLOAT, FLOAT))


# ---------------------------------------------------------------- forwarded


def test_which_outputs_are_inputs():
    jaxpr = traced(lambda x, y: [y, x + y, 1.0, x, y, x * 1.0], FLOAT, FLOAT)
    assert equations.forwarded(jaxpr) == [1, None, None, 0, 1, None]


def test_a_read_passes_its_buffer_on():
    def program(x, rows):
        first, rows = read(rows, jnp.zeros(1, jnp.int32), ROW)
        second, rows = read(rows, jnp.ones(1, jnp.int32), ROW)
        return [rows, first + second, x, rows * x]

    assert equations.forwarded(traced(program, FLOAT, ROWS)) == [1, None, 0, None]


# ---------------------------------------------------------------- axis_names


def along(fun):
    """The jaxpr of `fun`, between lanes of axes "i" and "j"."""
    found = []

    def lane(x):
        found.append(traced(fun, FLOAT))
        return x

    jax.vmap(jax.vmap(lane, axis_name="j"), axis_name="i")(jnp.zeros((2, 2)))
    return found[0]


def test_the_axes_that_equations_name():
    assert (
        equations.axis_names(along(lambda x: [x.sum(0, keepdims=False) if x.ndim else x])) == set()
    )
    assert equations.axis_names(along(lambda x: [lax.psum(x, "i")])) == {"i"}
    assert equations.axis_names(along(lambda x: [lax.pmax(x, ("i", "j"))])) == {"i", "j"}
    shift = lambda x: [lax.ppermute(x, "j", [(0, 1), (1, 0)])]
    assert equations.axis_names(along(shift)) == {"j"}


def test_axes_are_found_in_inner_loops():
    def program(x):
        return [lax.scan(lambda x, _: (lax.pmax(x, "j"), None), x, length=2)[0]]

    assert equations.axis_names(along(program)) == {"j"}
    assert equations.axis_names(traced(lambda x: [x.sum(0)], ROWS)) == set()


def test_who_one_is_says_nothing_of_others():
    index = along(lambda x: [x + lax.axis_index("i").astype(x.dtype)])
    assert equations.axis_names(index) == {"i"}
    assert equations.axis_names(index, others=True) == set()
    both = along(lambda x: [lax.psum(x, "j") + lax.axis_index("i").astype(x.dtype)])
    assert equations.axis_names(both, others=True) == {"j"}


# ---------------------------------------------------------------- varying


def test_where_nothing_varies_a_jaxpr_is_as_it_was():
    jaxpr = traced(nested, FLOAT, FLOAT)
    assert all_varying(jaxpr, [FLOAT, ROWS]) is jaxpr


def test_numbers_of_numpy_are_no_names_of_axes():
    jaxpr = jax.make_jaxpr(lambda x: lax.reduce_max(x, (np.int64(1),)))(jnp.ones((2, 2)))
    assert equations.axis_names(jaxpr) == set()
