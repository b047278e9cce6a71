"""Options never change a number: neither a result nor a derivative, nor which of them are NaN."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import loopkit
from derivatives import derivative
from loopkit import Plan
from option_programs import PROGRAMS
from problems import TABLE
from reference_loops import LaxLoops, LoopkitLoops
from tolerances import tolerance
from turns import later

OPTIONS = {
    "default": {},
    "1 carry": {"checkpoints": 1},
    "2 carries": {"checkpoints": 2, "unroll": 2},
    "5 carries": {"checkpoints": 5, "unroll": 3},
    "all": {"checkpoints": "all"},
    "all, unrolled": {"checkpoints": "all", "unroll": True},
    "a plan of carries": {"checkpoints": Plan(2, segment=2), "unroll": 3},
    "a plan of residuals": {"checkpoints": Plan(2, segment=3, store="residuals"), "unroll": 2},
    "a plan that thins": {"checkpoints": Plan(3, thinned=True)},
    "every carry": {"checkpoints": Plan(100), "unroll": 2},
    "every residual": {"checkpoints": Plan(0, keeps_all=True, store="residuals"), "unroll": 2},
    "few bytes": {"memory": 1600, "unroll": True},
    "many bytes": {"memory": "1 MB"},
    "unrolled": {"unroll": True},
    "four at a time": {"unroll": 4},
    "truncated late": {"truncate": 100, "unroll": 3},
    "axes": {"axis": 1},
    "replaced": {"replaced": {}},
    "replaced, 2 carries": {"replaced": {"checkpoints": 2}},
    "replaced, all": {"replaced": {"checkpoints": "all", "max_steps": 9}},
}
# The second derivative of the unrolled reference of one takes a minute to compile.
OF_TABLE = [name for name in TABLE if name != "rk4_lorenz"]
ALL = {name: TABLE[name] for name in OF_TABLE} | PROGRAMS
LAX = {"scan_xs_ys", "scan_reverse", "scan_without_xs", "fori_indexes_by_its_counter"}
LAX |= {name for name, problem in PROGRAMS.items() if "lax" in problem.tags}
"""Programs that lax can differentiate."""
OURS = {"reaches_its_bound", "scan_until", "scan_until_reverse", "while_in_scan"}
OURS |= {"until_it_is_large", "bound_methods"}
"""Programs that lax cannot say."""
CLOSE = dict.fromkeys(("rtol", "atol"), tolerance("float64"))
"""The tolerance, which holds for narrow types too: their arithmetic is exact there."""


class Loops(LoopkitLoops):
    """Options where they can be given: loops without a length have no axes, and are not unrolled
    at once."""

    def __init__(self, bound, checkpoints=None, axis=0, truncate=None, **options):
        super().__init__(bound, checkpoints, **options)
        if isinstance(checkpoints, Plan) and (checkpoints.keeps_all or checkpoints.slots > bound):
            self.bound = {"max_steps": bound}
        self.axis, self.truncate = axis, truncate
        self.unroll = {"unroll": 3} if options.get("unroll") is True else {}

    def while_loop(self, *args, **kwargs):
        return super().while_loop(*args, **self.unroll, **kwargs)

    def fori_loop(self, lower, upper, *args, **kwargs):
        unroll = {} if isinstance(upper, int) else self.unroll
        return super().fori_loop(lower, upper, *args, **unroll, **kwargs)

    def scan(self, f, init, xs=None, *args, **kwargs):
        kwargs = {"truncate": self.truncate, **kwargs}
        if not self.axis:
            return super().scan(f, init, xs, *args, **kwargs)
        # A leading axis of size 1, so that rows are along the second.
        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1)[None], xs)
        body = lambda carry, x: added(f(carry, jax.tree.map(lambda x: x[0], x)))
        axes = {"in_axes": -1, "out_axes": 1}
        if "until" in kwargs:
            until = kwargs["until"]
            kwargs["until"] = lambda carry, y: until(carry, jax.tree.map(lambda y: y[0], y))
        carry, ys, *info = super().scan(body, init, xs, *args, **axes, **kwargs)
        return (carry, jax.tree.map(lambda y: y[0], ys), *info)


def added(result):
    carry, y = result
    return carry, jax.tree.map(lambda y: jnp.asarray(y)[None], y)


def measured(program, problem):
    """A function of a vector: the program's results and its derivatives."""
    unravel = ravel_pytree(problem.args)[1]
    flat, of_tree = problem.flat(program), lambda x: program(*unravel(x))
    patterns = ["r", "rr"] if "reverse" in problem.tags else ["f", "r", "fr"]

    def measure(x):
        return of_tree(x), {p: derivative(flat, p)(x) for p in patterns}

    return measure


def lanes_of(problem):
    x = problem.vector()
    return jnp.stack([x, x * 1.25])


def with_options(problem, replaced=None, **options):
    """The function under test: of the arguments, and of the gradient in two lanes."""
    if replaced is None:
        return problem.through(Loops(problem.bound, **options))
    return loopkit.checkpointed(problem.through(LaxLoops()), **replaced)


def everything(program, problem):
    measure = measured(program, problem)
    gradient = derivative(problem.flat(program), "r")
    return lambda x, lanes: (measure(x), jax.vmap(gradient)(lanes))


@ft.cache
def reference(name):
    """lax's numbers where it has them, else those of a Python loop."""
    problem, x = ALL[name], ALL[name].vector()
    if name in LAX:
        by_lax = everything(problem.through(LaxLoops()), problem)
        return jax.jit(by_lax)(x, lanes_of(problem))
    at = lambda x: problem.reference(*ravel_pytree(problem.args)[1](x))
    numbers = jax.jit(measured(at(x), problem))(x)
    lanes = [jax.jit(derivative(problem.flat(at(x)), "r"))(x) for x in lanes_of(problem)]
    return numbers, jnp.stack(lanes)


def weak_type(value):
    return getattr(jax.typeof(value), "weak_type", False)  # keys have none


def assert_same(got, wanted, weak_types):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    with_paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, g), w in zip(with_paths, jax.tree.leaves(wanted), strict=True):
        assert g.dtype == w.dtype, path
        assert not weak_types or weak_type(g) == weak_type(w), path
        if jnp.issubdtype(g.dtype, jax.dtypes.prng_key):
            g, w = jax.random.key_data(g), jax.random.key_data(w)
        place = jax.tree_util.keystr(path)
        if jnp.issubdtype(g.dtype, jnp.inexact):
            g, w = (np.asarray(v, "complex128") for v in (g, w))
            np.testing.assert_allclose(g.real, w.real, **CLOSE, err_msg=place)
            np.testing.assert_allclose(g.imag, w.imag, **CLOSE, err_msg=place)
        else:
            np.testing.assert_array_equal(g, w, err_msg=place)


def check(name, option, compiled=True):
    problem = ALL[name]
    program = with_options(problem, **OPTIONS[option])
    got = everything(program, problem)
    got = jax.jit(got) if compiled else got
    assert_same(got(problem.vector(), lanes_of(problem)), reference(name), name in LAX)


def turn(names, each, start=0):
    """Pairs of a program and an option in which options take turns."""
    options = list(OPTIONS)
    pairs = []
    for i, name in enumerate(names):
        for j in range(each):
            option = options[(start + i * 7 + j * 3) % len(options)]
            if "replaced" in option and name in OURS:
                option = "all"
            pairs.append((name, option))
    return pairs


QUICK = ["no_step", "few_bits", "root_at_zero", "weak_types", "one_step", "overflows"]


@pytest.mark.parametrize(("name", "option"), turn(QUICK, 2, start=1))
def test_numbers_of_small_programs(name, option):
    check(name, option)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), turn(PROGRAMS, 1))
def test_numbers_of_programs(name, option):
    check(name, option)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), turn(OF_TABLE, 1, start=2))
def test_numbers_of_the_table(name, option):
    check(name, option)


EVERY = [(n, o) for n in ALL for o in OPTIONS if not ("replaced" in o and n in OURS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "option"), EVERY)
def test_value_and_gradient_under_every_option(name, option):
    problem = ALL[name]
    program = with_options(problem, **OPTIONS[option])
    gradient = derivative(problem.flat(program), "r")
    value = lambda x: program(*ravel_pytree(problem.args)[1](x))
    got = jax.jit(lambda x: (value(x), gradient(x)))(problem.vector())
    (numbers, derivatives), _ = reference(name)
    assert_same(got, (numbers, derivatives["r"]), name in LAX)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["no_step", later("few_bits")])
def test_numbers_without_jit(name):
    check(name, "2 carries", compiled=False)


def test_options_and_programs_are_all_met():
    pairs = [*turn(QUICK, 2, start=1), *turn(PROGRAMS, 1), *turn(OF_TABLE, 1, start=2)]
    names, options = map(set, zip(*pairs, strict=True))
    assert (names, options) == (set(ALL), set(OPTIONS))
