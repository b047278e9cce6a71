"""Every argument of every public function, given what it cannot be: each is refused by name."""

import inspect
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from argument_calls import (
    ALL_LOOPS,
    NAMES,
    REPLACING,
    REPORTING,
    X,
    best_unroll,
    blocked,
    by_name,
    checkpointed,
    empty,
    evaluations,
    fori_loop,
    fori_loop_to,
    get,
    length_buckets,
    plan,
    ragged_scan,
    refused,
    replace_lax_loops,
    scan,
    set_to,
    step,
    steps,
    unbounded_scan,
    while_loop,
)
from loopkit.schedules import binomial
from public_names import FUNCTIONS
from wrong_calls import CASES

FLAGS = [
    *((loop, "return_info") for loop in (*ALL_LOOPS, unbounded_scan, ragged_scan)),
    *((scan, "reverse"), (scan, "_split_transpose"), (while_loop, "throw")),
    *((plan, flag) for flag in ("keeps_all", "thinned", "host", "exact")),
    *((use, flag) for use in (set_to, get) for flag in ("unique_indices", "indices_are_sorted")),
    *((report, "grad") for report in REPORTING),
    *((best_unroll, "gradient"), (checkpointed, "measure")),
    *((call, "strict") for call in REPLACING),
]
NO_FLAGS = ["no", "", 2, -1, 0.0, 1.0, math.nan, [], jnp.asarray(True), np.ones(1, bool)]

COUNTS = [
    *((loop, "max_steps", 0) for loop in (*ALL_LOOPS[1:], *REPLACING)),
    *((loop, "unroll", 1) for loop in (while_loop, fori_loop_to)),
    *((loop, "unroll", 0) for loop in (scan, fori_loop)),
    *((loop, "checkpoints", 1) for loop in (*ALL_LOOPS, unbounded_scan, ragged_scan, *REPLACING)),
    *((loop, "memory", 1) for loop in (*ALL_LOOPS, ragged_scan, *REPLACING)),
    *(
        (best_unroll, name, least)
        for name, least in (("length", 0), ("checkpoints", 1), ("uses", 1))
    ),
    *((steps, "length", 0), (scan, "truncate", 1), (scan, "every", 1), (blocked, "block", 1)),
    *(
        (unbounded_scan, "segment", 1),
        (unbounded_scan, "max_segments", 1),
        (ragged_scan, "batch", 1),
    ),
    *((plan, "slots", 1), (plan, "segment", 1), (plan, "bound", 0), (plan, "room", 0)),
    (evaluations, "steps", 0),
    *((length_buckets, "first", 1), (empty, "capacity", 0)),
    *((report, "min_bytes", 0) for report in REPORTING),
]
LANES = (*ALL_LOOPS, *REPLACING)
NO_COUNTS = [2.5, 2.0, math.nan, [2], np.float32(2), np.arange(2)]


@pytest.mark.parametrize("case", FLAGS, ids=by_name)
def test_flags(case):
    call, argument = case
    for value in NO_FLAGS:
        refused(call, argument, value, TypeError)
    if argument != "strict":
        refused(call, argument, None, TypeError)
    for value in (np.False_, 0, np.int64(0)):
        call(**{argument: value})


def test_flags_of_numpy_say_the_same():
    for yes in (np.True_, 1, np.int32(1)):
        want = loopkit.scan(lambda c, x: (c + x, c), 0.0, X, reverse=True)
        got = loopkit.scan(lambda c, x: (c + x, c), 0.0, X, reverse=yes)
        np.testing.assert_array_equal(got[1], want[1])
        assert len(scan(return_info=yes)) == 3
        assert len(while_loop(return_info=yes)) == 2
        assert plan(keeps_all=yes) == plan(keeps_all=True)
        assert type(plan(exact=yes).exact) is bool


@pytest.mark.parametrize("case", COUNTS, ids=by_name)
def test_counts(case):
    call, argument, least = case
    for value in NO_COUNTS:
        refused(call, argument, value, TypeError)
    if argument != "unroll":
        for value in (True, np.True_):
            refused(call, argument, value, TypeError)
    for value in {-1, np.int64(-3), least - 1}:
        refused(call, argument, value, ValueError)
    refused(call, argument, "x")
    if argument != "memory":
        for value in (np.int64(max(least, 1)), np.uint8(3)):
            call(**{argument: value})


def test_counts_that_are_traced():
    for call, argument, _ in COUNTS:
        if argument != "min_bytes":
            with pytest.raises(TypeError, match=f"`{argument}"):
                jax.jit(lambda n, call=call, argument=argument: call(**{argument: n}))(2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "memory", [0, "0 B", "0.0 MB", "0.4 B", "-1 MB", "3", "MB", "1 XB", "", " "]
)
def test_memory_that_is_none(memory):
    for call in (*ALL_LOOPS, *REPLACING):
        refused(call, "memory", memory, ValueError)
        refused(call, "memory", {"device": memory, "host": "1 MB"}, ValueError)
        refused(call, "memory", {"device": "1 MB", "host": memory}, ValueError)


def test_memory_of_the_wrong_keys():
    incomplete = {}, {"device": 9}, {"host": 9}
    for memory in (*incomplete, {"device": 9, "host": 9, 1: 9}, {"gpu": 1, 2: 3}):
        refused(scan, "memory", memory, ValueError)


@pytest.mark.parametrize("call", LANES, ids=lambda call: call.__name__)
def test_lanes(call):
    for value in (64, 0.5, True, X, ("64",), (4.0, 2), (True,), {4, 2}, (None,)):
        refused(call, "lanes", value, TypeError)
    for value in ("all", "", (), (0,), (4, 0), (4, -1), (4, 4), (2, 4), [3, 3]):
        refused(call, "lanes", value, ValueError)
    for value in (None, "wait", "compact", (4, 2), [1], (np.int64(7), np.int8(3))):
        call(lanes=value)


SHOWING = (*LANES, unbounded_scan, ragged_scan, blocked)


@pytest.mark.every_case
@pytest.mark.parametrize("call", SHOWING, ids=lambda call: call.__name__)
def test_progress(call):
    for value in (1, True, [], X, object()):
        refused(call, "progress", value, TypeError)
    for value in ("", "bar", "TQDM"):
        refused(call, "progress", value, ValueError)
    call(progress=None)


GROWING = unbounded_scan, ragged_scan, length_buckets


def test_growth():
    for call in GROWING:
        for value in ("2", None, True, 1j, [2]):
            refused(call, "growth", value, TypeError)
        for value in (0, -1, 0.5, math.nan, math.inf):
            refused(call, "growth", value, ValueError)
        for value in (2, 1.5, np.float32(1.5), np.int64(2)):
            call(growth=value)
    unbounded_scan(growth=1)
    for call in (ragged_scan, length_buckets):
        refused(call, "growth", 1, ValueError)


def test_lengths():
    no_ints = [True], [1.5], ["3"], np.ones(2), np.ones((2, 2), int)
    for value in (None, 3, "34", {3: 1}, {3, 4}, *no_ints):
        refused(length_buckets, "lengths", value, TypeError)
    refused(length_buckets, "lengths", [3, -1], ValueError)
    text = (
        "loopkit.length_buckets: `lengths` must be a list of ints >= 0. Pass the length of each "
        "sequence, in order. Got: None of type NoneType."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        loopkit.length_buckets(None)
    for value in ((3, 4), np.array([3, 4]), jnp.array([3, 4]), iter([3, 4]), range(3, 5)):
        assert loopkit.length_buckets(value) == {8: [0, 1]}


AXES = [(call, argument) for call in (scan, blocked) for argument in ("in_axes", "out_axes")]


@pytest.mark.every_case
@pytest.mark.parametrize("case", AXES, ids=by_name)
def test_axes(case):
    call, argument = case
    for value in ("0", 0.0, True, np.True_, math.nan):
        refused(call, argument, value, TypeError)
    for value in (7, -7):
        refused(call, argument, value, ValueError)
    call(**{argument: np.int64(0)})


CALLED = [
    *((scan, "until"), (ragged_scan, "until")),
    *((unbounded_scan, "until"), (unbounded_scan, "f"), (ragged_scan, "f")),
    *((checkpointed, "only"), (replace_lax_loops, "only")),
]


@pytest.mark.every_case
@pytest.mark.parametrize("case", CALLED, ids=by_name)
def test_functions(case):
    for value in ("x", 1, True, [], X):
        refused(*case, value, TypeError)


OF_FUNCTIONS = [name for name, f in FUNCTIONS.items() if "fn" in inspect.signature(f).parameters]


@pytest.mark.every_case
@pytest.mark.parametrize("function", OF_FUNCTIONS)
def test_functions_that_are_none(function):
    for value in ("x", 1, X):
        with pytest.raises(
            TypeError, match=rf"loopkit\.{function}: `fn` must be a function[.] .*Got: "
        ):
            FUNCTIONS[function](value)


ARRAYS = [(unbounded_scan, "init"), (unbounded_scan, "xs"), (ragged_scan, "init")]
ARRAYS += [(ragged_scan, "sequences")]


@pytest.mark.every_case
@pytest.mark.parametrize("case", ARRAYS, ids=by_name)
def test_trees_of_arrays(case):
    for value in (np.array(["x"]), {"a": [np.array([None])]}, [jax.ShapeDtypeStruct((2,), int)]):
        with pytest.raises(TypeError, match=rf"loopkit\.{case[0].__name__}: `{case[1]}.* Got: "):
            case[0](**{case[1]: value})


def test_fields_of_a_plan():
    for value in ("rows", 3, None, True):
        refused(plan, "store", value, ValueError)
    for value in (3, None, (1, 2)):
        refused(plan, "step", value, TypeError)
    assert loopkit.Plan(0, keeps_all=True).slots == 0
    refused(plan, "slots", None, TypeError)
    refused(plan, "segment", None, TypeError)
    assert plan(slots=0, bound=0).evaluations() == (0, 0)
    kept = plan(slots=0, bound=0)
    with pytest.raises(ValueError, match=r"loopkit\.Plan: `slots` must be an int >= 1 \(carries"):
        jax.grad(lambda x: loopkit.scan(step, x, None, 3, checkpoints=kept)[0])(1.0)
    numpy = loopkit.Plan(np.int64(3), segment=np.int8(2), bound=np.uint8(9))
    assert numpy == loopkit.Plan(3, segment=2, bound=9)
    assert {type(n) for n in (numpy.slots, numpy.segment, numpy.bound)} == {int}
    assert plan(bound=None).bound is plan(room=None).room is None


def test_drawing_a_plan():
    pytest.importorskip("matplotlib").use("agg")
    drawn = loopkit.Plan(2, bound=3)
    for value in ("3", 1.5, True):
        with pytest.raises(TypeError, match=r"loopkit\.Plan\.plot: `steps` must be an int >= 0"):
            drawn.plot(value)
    with pytest.raises(ValueError, match=r"loopkit\.Plan\.plot: `steps` must be an int >= 0"):
        drawn.plot(-1)
    for value in (3, "x", [1, 2, 3]):
        with pytest.raises(
            TypeError, match=r"Plan\.plot: `ax` must be a pair of axes[.] Pass.* Got: "
        ):
            drawn.plot(ax=value)


def test_integers_of_schedules():
    for call in (binomial.evaluations, binomial.advances):
        for value in (True, False, 1.5, "1", None, math.nan):
            with pytest.raises(TypeError, match=r"`segments` must be an int >= \d[.] .*Got:"):
                call(value, 2)
        with pytest.raises(ValueError, match=r"`segments` must be an int >= "):
            call(-1, 2)
    assert binomial.evaluations(np.int64(3), np.uint8(3)) == 3


WATCHING = (*LANES, *(call for call in GROWING if call.__name__ != "length_buckets"))


@pytest.mark.parametrize("call", WATCHING, ids=lambda call: call.__name__)
def test_debug(call):
    for value in (True, 1, X, (1,), ("nan",)):
        refused(call, "debug", value, TypeError)
    for value in ("nan", "", "Finite"):
        refused(call, "debug", value, ValueError)
    with pytest.raises(ValueError, match=r"`debug` must be None or \"finite\".*'nan' of type str"):
        call(debug="nan")
    for value in (None, (), ("finite",), ["finite"]):
        call(debug=value)


# ---------------------------------------------------------------- all of them


def refusals():
    """(function, argument): what is given wrong values here, and in wrong_calls.py."""
    for call, argument, *_ in (*FLAGS, *COUNTS, *AXES, *CALLED, *ARRAYS):
        yield NAMES.get(call, call.__name__), argument
        yield call.__name__, argument
    yield from ((call.__name__, "growth") for call in GROWING)
    yield from ((call.__name__, "buffers") for call in ALL_LOOPS)
    yield from ((name, "fn") for name in OF_FUNCTIONS)
    yield "length_buckets", "lengths"
    yield from (("best_unroll", name) for name in ("f", "init", "xs"))  # tests/test_unroll.py
    yield from ((call.__name__, "lanes") for call in LANES)
    yield from ((call.__name__, "progress") for call in SHOWING)
    yield from ((call.__name__, "debug") for call in WATCHING)
    yield from ((case.function, case.argument) for case in CASES)


@pytest.mark.every_case
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_argument_is_left_out(name):
    passed_on = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    arguments = {p.name for p in parameters if p.kind not in passed_on}
    assert not arguments - {argument for function, argument in refusals() if function == name}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if hasattr(jax.lax, name)])
def test_the_arguments_of_lax_come_first(name):
    """loopkit's functions have lax's arguments first, with the same names and defaults."""

    def described(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    of_lax = described(getattr(jax.lax, name))
    assert described(FUNCTIONS[name])[: len(of_lax)] == of_lax
