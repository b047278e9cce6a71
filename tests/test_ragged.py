"""Scans of sequences of many lengths, against a scan of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopkit
from derivatives import assert_close

LENGTHS = (3, 0, 21, 4, 17, 9, 9, 8, 1)
SEQUENCES = [
    {
        "x": jnp.asarray(np.sin(np.arange(2.0 * n) + k).reshape(n, 2)),
        "row": jnp.asarray(np.arange(n)),
    }
    for k, n in enumerate(LENGTHS)
]


def f_of(w):
    def f(h, xs):
        h = jnp.tanh(w * h + jnp.sum(xs["x"]) + 0.1 * xs["row"].astype(float))
        return h, (h, xs["x"] * h)

    return f


def one_by_one(w, sequences, until=None):
    results = []
    for xs in sequences:
        h, ys = jnp.asarray(0.1), []
        for t in range(len(xs["row"])):
            h, y = f_of(w)(h, jax.tree.map(lambda x, t=t: x[t], xs))
            ys.append(y)
            if until is not None and until(h, y):
                break
        results.append((h, jax.tree.map(lambda *y: jnp.stack(y), *ys) if ys else None))
    return jnp.stack([h for h, _ in results]), [ys for _, ys in results]


def ragged(w, sequences, **options):
    return loopkit.ragged_scan(f_of(w), 0.1, sequences, **{"batch": 3} | options)


def loss(scan, **options):
    def of(w, floats):
        sequences = [xs | {"x": x} for xs, x in zip(SEQUENCES, floats, strict=True)]
        carries, ys = scan(w, sequences, **options)
        return jnp.sum(carries**2) + sum(jnp.sum(y[0] ** 3) + jnp.sum(y[1]) for y in ys if y)

    return of


FLOATS = [xs["x"] for xs in SEQUENCES]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_value(batch):
    carries, ys, info = ragged(0.5, SEQUENCES, batch=batch, return_info=True)
    wanted, wanted_ys = one_by_one(0.5, SEQUENCES)
    assert_close(carries, wanted)
    assert info.steps.tolist() == list(LENGTHS)
    assert not info.stopped.any()
    for got, want, length in zip(ys, wanted_ys, LENGTHS, strict=True):
        assert len(got[0]) == length
        if length:
            assert_close(got, want)


@pytest.mark.slow
def test_each_stops_at_its_own_step():
    until = lambda h, _: h > 0.9
    carries, ys, info = ragged(0.5, SEQUENCES, until=until, return_info=True)
    wanted, wanted_ys = one_by_one(0.5, SEQUENCES, until)
    assert_close(carries, wanted)
    steps = [0 if y is None else len(y[0]) for y in wanted_ys]
    assert info.steps.tolist() == steps == [len(y[0]) for y in ys]
    assert info.stopped.tolist() == [bool(h > 0.9) for h in wanted]
    assert 0 < np.sum(info.stopped) < len(LENGTHS)


@pytest.mark.slow
def test_derivatives():
    """In what is closed over and in the sequences; second order; inside jit; under vmap."""
    few = {"batch": 64, "growth": 4.0}  # batches, each of which is compiled
    ours, theirs = loss(ragged, **few), loss(one_by_one)
    grads = jax.grad(theirs, (0, 1))(0.5, FLOATS)
    assert_close(jax.jit(jax.grad(ours, (0, 1)))(0.5, FLOATS), grads)
    assert_close(jax.grad(loss(ragged, until=lambda h, _: h > 5.0, **few))(0.5, FLOATS), grads[0])
    slope = lambda of: lambda w: jax.jvp(lambda w: of(w, FLOATS), (w,), (1.0,))[1]
    assert_close(jax.jit(jax.grad(slope(ours)))(0.5), jax.grad(slope(theirs))(0.5))
    many = jax.vmap(lambda w: ours(w, FLOATS))(jnp.array([0.5, 0.7]))
    assert_close(many, jnp.stack([theirs(0.5, FLOATS), theirs(0.7, FLOATS)]))


def test_buckets():
    lengths = np.random.default_rng(0).integers(0, 3000, 500).tolist()
    buckets = loopkit.length_buckets(lengths, growth=1.5, first=10)
    assert sorted(place for places in buckets.values() for place in places) == list(range(500))
    assert list(buckets) == sorted(buckets)
    for size, places in buckets.items():
        assert all(lengths[i] <= size for i in places)
        assert size == 10 or all(size <= 1.5 * lengths[i] for i in places)
    assert loopkit.length_buckets([]) == {}


def test_wide_buckets_pad_to_less_than_twice_the_longest():
    assert loopkit.length_buckets([900, 5000], growth=100.0) == {8192: [0, 1]}
    assert loopkit.length_buckets([2, 3, 900], growth=1e4) == {8: [0, 1], 1024: [2]}
    assert loopkit.length_buckets([4096], growth=1e4) == {4096: [0]}
    lengths = np.random.default_rng(1).integers(0, 30_000, 300).tolist()
    for growth in (1.25, 2.0, 7.0, 1e3):
        for size, places in loopkit.length_buckets(lengths, growth=growth).items():
            assert size <= max(8, 2 * max(lengths[i] for i in places))


@pytest.mark.slow
def test_a_budget_in_bytes():
    """Each sequence of a batch has it, and numbers do not change."""
    sequences = [jnp.sin(jnp.arange(n, dtype=float)) for n in (300, 280)]
    step = lambda c, x: (jnp.sin(c) * x, None)
    total = lambda w, **how: loopkit.ragged_scan(step, w, sequences, **how)[0].sum()
    few = lambda w: total(w, memory="1 kB")
    assert_close(jax.grad(few)(0.5), jax.grad(total)(0.5))
    plans = [loop.plan for loop in loopkit.explain(few, 0.5)]
    assert plans
    assert all(plan.peak_bytes <= 1000 for plan in plans)


@pytest.mark.parametrize(("lengths", "error"), [([3, -1], ValueError), ([3, 1.5], TypeError)])
def test_lengths_that_are_none(lengths, error):
    with pytest.raises(error, match=r"loopkit\.length_buckets: `lengths` must be a list of ints"):
        loopkit.length_buckets(lengths)


def test_inside_jit_a_predicate_is_an_error():
    with pytest.raises(TypeError, match=r"ragged_scan: `until` must be known between batches"):
        jax.jit(lambda w: ragged(w, SEQUENCES, until=lambda h, _: h > 0.9)[0])(0.5)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sequences": []}, TypeError, "`sequences` must be a list of at least one sequence"),
        ({"sequences": jnp.ones((2, 3))}, TypeError, "`sequences` must be a list"),
        ({"sequences": [jnp.ones(2), jnp.ones((2, 2))]}, ValueError, r"rows of float64\[2\]"),
        ({"sequences": [jnp.ones(2), 3.0]}, ValueError, r"`sequences\[1\]` must have a leading"),
        ({"sequences": [jnp.ones(2), "ab"]}, ValueError, r"`sequences\[1\]` must have an array"),
        ({"batch": 0}, ValueError, "`batch` must be an int >= 1"),
        ({"growth": 1}, ValueError, "`growth` must be more than 1"),
        ({"growth": None}, TypeError, "`growth` must be a finite number >= 1"),
        ({"until": 1}, TypeError, "`until` must be a function"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, error, text):
    arguments = {"sequences": [jnp.ones(2)]} | arguments
    with pytest.raises(error, match=text):
        loopkit.ragged_scan(lambda c, x: (c + x, c), 0.0, **arguments)
