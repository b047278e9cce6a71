"""Predictions of the planner beside measurements: times of steps, and the plans that it takes.

    python benchmarks/costs.py [--only prices,plans,long,weights] [--steps fft,eigh] [--cpu]

| step     | what it is                                        | steps  |
| -------- | ------------------------------------------------- | ------ |
| scalar   | one number of the logistic map                    | 10,000 |
| lorenz   | a Runge-Kutta step of three numbers               | 10,000 |
| layer    | `tanh(w @ x)` on 32 numbers                       | 2,000  |
| fft      | two transforms of 256 numbers, and back           | 400    |
| sort     | 256 numbers sorted                                | 400    |
| solve    | a Cholesky factor of a 32x32 matrix, and a solve  | 200    |
| eigh     | eigenvectors of a 32x32 matrix                    | 100    |
| mlp      | two layers on a 64x64 state                       | 200    |
| gru      | a gated recurrent unit, batch 32, width 128       | 200    |
| vector   | `x + 1e-3 * sin(p * x)` on 10,000 numbers         | 200    |
| conv     | a 3x3 convolution of 32x32 pixels, 8 features     | 50     |
| field    | reaction and diffusion on a 1024x1024 grid        | 16     |
| product  | two matrices of 1024x1024                         | 9      |
"""

import argparse
import functools as ft
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

import harness
import loopkit
import steps
from findings import Record, spread
from loopkit import Plan
from loopkit._jaxprs.cost import nanoseconds
from report import Report
from steps import Case

LENGTHS = {"lorenz": 10_000, "mlp": 200, "gru": 200, "vector": 200, "field": 16}
WITHIN = 1.15  # of the time of the best plan that needs no more memory
FACTOR = 2.0  # between predicted and measured


def _spectral(w, u):
    return jnp.fft.irfft(w * jnp.fft.rfft(u + 0.01 * u * jnp.fft.irfft(w * jnp.fft.rfft(u))))


def _solve(p, x):
    factor = jnp.linalg.cholesky(p + 0.01 * x @ x.T)
    return 0.1 * lax.linalg.triangular_solve(factor, x, left_side=True, lower=True) + 0.9 * x


def _eigh(p, x):
    values, vectors = jnp.linalg.eigh((x + x.T) / 2)
    return (vectors * (values - 0.01 * p * jnp.sin(values))) @ vectors.T


def _conv(p, x):
    return jnp.tanh(lax.conv(x, p, (1, 1), "SAME"))


def _made() -> dict[str, tuple[Callable, object, jax.Array, int]]:
    """Steps that are in no other benchmark: the step, its parameters, its state, how often."""
    draw = lambda number, *shape: jax.random.normal(jax.random.key(number), shape)
    square = draw(0, 32, 32) / 100
    apart = square + square.T + jnp.diag(jnp.linspace(1.0, 9.0, 32))
    return {
        "scalar": (lambda p, x: p * x * (1 - x), jnp.float32(3.2), jnp.float32(0.3), 10_000),
        "layer": (lambda w, x: jnp.tanh(w @ x), draw(1, 32, 32) / 6, draw(2, 32), 2_000),
        "fft": (_spectral, jnp.exp(-jnp.linspace(0, 3, 129)), draw(3, 256), 400),
        "sort": (lambda p, x: jnp.sort(x * p), jnp.linspace(-1.0, 1.0, 256), draw(4, 256), 400),
        "solve": (_solve, 2 * jnp.eye(32), draw(5, 32, 32), 200),
        "eigh": (_eigh, jnp.linspace(0.9, 1.0, 32), apart, 100),
        "conv": (_conv, draw(6, 8, 8, 3, 3) / 9, draw(7, 1, 8, 32, 32), 50),
        "product": (lambda w, x: x @ w, draw(8, 1024, 1024) / 32, draw(9, 1024, 1024), 9),
    }


NAMES = (
    *("scalar", "lorenz", "layer", "fft", "sort", "solve", "eigh"),
    *("mlp", "gru", "vector", "conv", "field", "product"),
)


def make(name: str) -> Case:
    """Return the loop over the step of this name."""
    if name in LENGTHS:
        return steps.make(name, LENGTHS[name])
    step, params, init, length = _made()[name]
    return Case(name, lambda p, x, _: (step(p, x), None), params, init, None, length)


def _scan(checkpoints=None, loop=loopkit.scan):
    keywords = {} if loop is lax.scan else {"checkpoints": checkpoints}
    return lambda step, init, xs, length, _: loop(step, init, xs, length, **keywords)


def _plan(case: Case) -> Plan:
    """Return the default plan of the loop's gradient."""

    def loss(params, init, xs):
        step = lambda carry, x: case.step(params, carry, x)
        return loopkit.scan(step, init, xs, length=case.length)

    return loopkit.explain(loss, case.params, case.init, case.xs).plan


def compare_prices(report: Report, repeats: int, names: Sequence[str] = NAMES) -> None:
    """The predicted time of a step beside that of a step of the loop alone."""
    records = []
    for name in names:
        case = make(name)
        given = case.params, case.init, case.xs

        def value(params, init, xs, case=case):
            step = lambda carry, x: case.step(params, carry, x)
            return lax.scan(step, init, xs, case.length)[0]

        predicted = nanoseconds(jax.make_jaxpr(value)(*given)) / 1e9 / case.length
        call = ft.partial(jax.jit(value), *given)
        seconds = spread(s / case.length for s in harness.interleave({name: call}, repeats)[name])
        off = max(predicted / seconds.mid, seconds.mid / predicted)
        counts = {
            "predicted, us": predicted * 1e6,
            "predicted over measured": predicted / seconds.mid,
        }
        records.append(Record("a step", name, seconds, counts=counts))
        report.target(f"{name}: predicted against measured time, either way", off, FACTOR)
    report.measured(records)


def grid(plan: Plan) -> Iterator[Plan]:
    """Plans that need no more memory: a slot for every segment, and what rows may hold."""
    bound = plan.bound or 1
    lengths = sorted({min(2**k, bound) for k in range(0, bound.bit_length() + 1, 2)} | {bound})
    whole = replace(plan, slots=0, segment=bound, store="residuals", keeps_all=True)
    found = [whole, *(
        replace(plan, slots=-(-bound // n), segment=n, store=store, keeps_all=False)
        for n in lengths
        for store in ("carries", "residuals")
        if n > 1 or store == "carries"
    )]  # fmt: skip
    return (p for p in (plan, *found) if p.peak_bytes <= plan.peak_bytes)


def compare_plans(report: Report, repeats: int, names: Sequence[str] = NAMES) -> None:
    """The default plan's time, over that of the best of others that need no more memory."""
    for name in names:
        case = make(name)
        default = _plan(case)
        functions = {
            "lax": steps.gradient(_scan(loop=lax.scan), case),
            "default": steps.gradient(_scan(), case),
        }
        for plan in grid(default):
            functions[plan.stored] = steps.gradient(_scan(plan), case)
        arguments = case.params, case.init, case.xs, 0
        found = harness.measure(functions, arguments, repeats, rtol=1e-2)
        best = min(found.keys() - {"lax", "default"}, key=lambda n: min(found[n].seconds))
        over = harness.ratio(found["default"].seconds, found[best].seconds)
        report.write(f"### {name}: the default is {default.stored}; best is {best}\n")
        report.measured(harness.recorded(name, found, "lax"))
        report.target(f"{name}: time of the default over that of the best plan", over, WITHIN)


def _scattered(w, x, u):
    x = x.at[jnp.array([5, 0, 11, 7])].add(jnp.sin(w[:4] * x[:4] + u))
    return 0.9 * jnp.cos(w * x)


def _neighbours(w, x, u):
    return 0.9 * jnp.cos(w * x[jnp.roll(jnp.arange(16), 1)] + u)


def _implicit(w, x, u):
    return jnp.linalg.solve(3 * jnp.eye(16) + 0.1 * jnp.outer(w, x), jnp.sin(x) + u)


def _ordered(w, x, u):
    return jnp.sort(jnp.sin(x * w + u))


LONG = {"scatter": _scattered, "gather": _neighbours, "solve": _implicit, "sort": _ordered}
"""Steps on 16 numbers that XLA does not make one kernel of a loop of."""
LONG_STEPS = 30_000


def compare_long_loops(report: Report, repeats: int, names: Sequence[str] = tuple(LONG)) -> None:
    """Gradients of long loops with inputs and outputs, beside those of lax."""
    xs = jnp.linspace(0.1, 0.3, LONG_STEPS)
    for name in names:

        def gradient(loop, step=LONG[name], **options):
            def loss(w, xs):
                taken = lambda x, u: (y := step(w, x, u), y.sum())
                x, ys = loop(taken, jnp.ones(16), xs, **options)
                return (x**2).sum() + jnp.sin(ys).sum()

            return jax.grad(loss, (0, 1))

        functions = {
            "lax": gradient(lax.scan),
            "default": gradient(loopkit.scan),
            "checkpoints='all'": gradient(loopkit.scan, checkpoints="all"),
        }
        found = harness.measure(functions, (jnp.linspace(0.5, 1.5, 16), xs), repeats, rtol=1e-2)
        report.measured(harness.recorded(name, found, "lax"))
        over = harness.ratio(found["checkpoints='all'"].seconds, found["lax"].seconds)
        report.target(f"{name}, {LONG_STEPS:,} steps: time of 'all' over that of lax", over, 1.0)


SHAPES = (1, 256, 500), (8, 128, 1000), (8, 256, 500), (32, 256, 256), (128, 128, 256)
RECURRENT = {f"{rows} x {units}, {n:,} steps": (rows, units, n) for rows, units, n in SHAPES}
"""Recurrent loops with weight matrices: rows, units, steps."""


def _gated(weights, h, x):
    gate = jax.nn.sigmoid(h @ weights[0] + x @ weights[1])
    h = gate * h + (1 - gate) * jnp.tanh(x @ weights[0])
    return h, h


def _of_weights(loop: Callable, **options) -> Callable:
    def loss(weights, xs):
        h, ys = loop(ft.partial(_gated, weights), jnp.zeros_like(xs[0]), xs, **options)
        return h.sum() + (ys**2).sum()

    return jax.grad(loss, (0, 1))


def compare_recurrent_loops(
    report: Report, repeats: int, names: Sequence[str] = tuple(RECURRENT)
) -> None:
    """Gradients of a gated step that multiplies by two matrices, beside those of lax."""
    for name in names:
        rows, units, length = RECURRENT[name]
        keys = jax.random.split(jax.random.key(0), 3)
        weights = [jax.random.normal(key, (units, units)) / units**0.5 for key in keys[:2]]
        functions = {
            "lax": _of_weights(lax.scan),
            "default": _of_weights(loopkit.scan),
            "checkpoints='all'": _of_weights(loopkit.scan, checkpoints="all"),
        }
        given = weights, jax.random.normal(keys[2], (length, rows, units))
        found = harness.measure(functions, given, repeats, rtol=1e-3)
        report.measured(harness.recorded(name, found, "lax"))
        over = harness.ratio(found["checkpoints='all'"].seconds, found["lax"].seconds)
        report.target(f"{name}: time of 'all' over that of lax", over, 1.05)


SECTIONS = {
    "prices": ("Times of steps, predicted and measured", compare_prices),
    "plans": ("The default beside other plans", compare_plans),
    "long": ("Long loops whose steps are not one kernel", compare_long_loops),
    "weights": ("Recurrent loops with weight matrices", compare_recurrent_loops),
}
CHOICES = {"long": tuple(LONG), "weights": tuple(RECURRENT)}
"""The loops of sections that do not run the steps of `NAMES`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--steps", help="all that a section has by default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    given = parser.parse_args()
    if given.cpu:
        harness.clock = time.process_time
    report = Report()
    report.write(harness.describe_machine())
    for section in given.only.split(","):
        title, run = SECTIONS[section]
        report.write(f"\n## {section}: {title}\n")
        names = CHOICES.get(section, NAMES)
        asked = names if given.steps is None else given.steps.split(",")
        run(report, given.repeats, [n for n in names if n in asked])
    report.summary()


if __name__ == "__main__":
    main()
