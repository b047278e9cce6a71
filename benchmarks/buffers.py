"""Buffers: rows written to the carry, overwritten, read back; against lax.scan and equinox.

python benchmarks/buffers.py
python benchmarks/buffers.py --only rows,cache --repeats 15 --markdown buffers.md
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopkit
from engine import Report
from harness import describe_machine, interleave, measure, measurement_table, ratio, temp_bytes

LENGTHS = 1000, 8000, 64000
LONGEST_OF_MANY = 16000  # rows for 32 lanes: 64000 of them are 400 MB an array


def second(carry):
    return carry[1]


# --- rows of 10x5 written to the carry --------------------------------------------------------


def rows_in_carry(loop, xs):
    """The sum of T rows that a loop writes into its carry; T is that of the rows it reads."""

    def body(state, _):
        i, ys = state
        return (i + 1, ys.at[i].set(xs[i] * i**0.5)), None

    (_, ys), _ = loop(body, (0, jnp.zeros_like(xs)), None, len(xs))
    return jnp.sum(ys**2)


def rows_stacked(xs):
    def body(i, x):
        return i + 1, x * i**0.5

    return jnp.sum(lax.scan(body, 0, xs)[1] ** 2)


def equinox_scan(body, init, xs, length, checkpoints=None):
    kind = {"kind": "checkpointed", "checkpoints": checkpoints}
    return eqxi.scan(body, init, xs, length, buffers=second, **kind)


def loopkit_scan(body, init, xs, length, **how):
    return loopkit.scan(body, init, xs, length, buffers=second, **how)


def loopkit_while(body, init, xs, length):
    how = {"max_steps": length, "buffers": second}
    step = lambda carry: body(carry, None)[0]
    return loopkit.while_loop(lambda carry: carry[0] < length, step, init, **how), None


CONTENDERS = {
    "lax.scan, stacked ys": rows_stacked,
    "loopkit.scan": partial(rows_in_carry, loopkit_scan),
    "loopkit.while_loop": partial(rows_in_carry, loopkit_while),
    "equinox": partial(rows_in_carry, equinox_scan),
}


def gradient(function, batch):
    g = jax.grad(function)
    return jax.vmap(g) if batch > 1 else g


def compare_rows(report: Report, repeats: int) -> None:
    """Gradients of rows written once."""
    for batch in (1, 4, 32):
        lengths = [t for t in LENGTHS if batch < 32 or t <= LONGEST_OF_MANY] + (
            [LONGEST_OF_MANY] if batch == 32 else []
        )
        lengths = sorted(set(lengths))
        lanes = (batch,) if batch > 1 else ()
        shape = lambda t, lanes=lanes: (*lanes, t, 10, 5)
        functions = {name: gradient(f, batch) for name, f in CONTENDERS.items()}
        if batch == 1:
            functions["equinox, every step"] = jax.grad(
                partial(rows_in_carry, partial(equinox_scan, checkpoints="all"))
            )
        growth = {}
        for t in lengths:
            xs = jax.random.uniform(jax.random.key(0), shape(t))
            results = measure(functions, (xs,), repeats)
            report.write(f"\n### {t} rows, batch of {batch}\n")
            report.write(measurement_table(results, "lax.scan, stacked ys"))
            growth[t] = results
        report.write()
        first, last = growth[lengths[0]], growth[lengths[-1]]
        for name in ("loopkit.scan", "loopkit.while_loop"):
            grown = ratio(last[name].seconds, first[name].seconds)
            limit = 1.25 * lengths[-1] / lengths[0]
            what = f"{name}, batch {batch}: time of {lengths[-1]} rows by that of {lengths[0]}"
            report.target(what, grown, limit)
            memory = last[name].temp_bytes / first[name].temp_bytes
            report.target(f"{what.replace('time', 'memory')}", memory, limit)
            for t in lengths[1:]:
                seconds = growth[t]
                against = ratio(seconds[name].seconds, seconds["lax.scan, stacked ys"].seconds)
                report.target(f"{name}, batch {batch}, {t} rows, by lax.scan", against, 1.5)
                against = ratio(seconds[name].seconds, seconds["equinox"].seconds)
                report.target(f"{name}, batch {batch}, {t} rows, by equinox", against, 0.8)


# --- rows that are overwritten ----------------------------------------------------------------


def recurrence(xs, at, read, checkpoints=None):
    """T steps; each reads a row, and writes one."""

    def body(carry, x):
        i, rows = carry
        y = jnp.tanh(rows[read(i)] * x + 0.1)
        return (i + 1, rows.at[at(i)].set(y)), None

    init = (1, jnp.ones((len(xs) + 1, *xs.shape[1:])))
    how = {"buffers": second, "checkpoints": checkpoints}
    return jnp.sum(loopkit.scan(body, init, xs, **how)[0][1])


def over_rows(xs: Any, rows: int, checkpoints: Any) -> Any:
    return recurrence(xs, lambda i: i % rows, lambda i: (i - 1) % rows, checkpoints)


def compare_overwriting(report: Report, repeats: int) -> None:
    """Gradients where rows are overwritten, by those where each is written once."""
    for t in (1000, 16000):
        xs = jax.random.uniform(jax.random.key(0), (t, 64))
        for checkpoints in (None, 64, "all"):
            functions = {
                "written once": partial(over_rows, rows=t, checkpoints=checkpoints),
                "overwritten": partial(over_rows, rows=t // 2, checkpoints=checkpoints),
            }
            args = dict.fromkeys(functions, (xs,))
            compiled = {n: jax.jit(jax.grad(f)).lower(xs).compile() for n, f in functions.items()}
            seconds = interleave({n: partial(c, xs) for n, c in compiled.items()}, repeats)
            against = ratio(seconds["overwritten"], seconds["written once"])
            what = (
                f"overwriting, {t} rows, checkpoints={checkpoints!r}: time by that of writing once"
            )
            memory = {n: temp_bytes(c) for n, c in compiled.items()}
            report.write(
                f"- {t} rows, checkpoints={checkpoints!r}: "
                + ", ".join(
                    f"{n} {1e3 * median(seconds[n]):.3g} ms, {memory[n] / 1e6:.3g} MB" for n in args
                )
            )
            report.target(what, against, 1.6)


# --- forward ------------------------------------------------------------------------------------


def check_in_place(report: Report, repeats: int) -> None:
    """Copies in the steps of compiled loops."""
    xs = jnp.ones((64000, 10, 5))
    for name, grad in (("value", False), ("gradient", True)):
        for loop in ("loopkit.scan", "loopkit.while_loop"):
            found = loopkit.in_place_report(CONTENDERS[loop], xs, grad=grad)
            report.write(f"- {loop}, {name}: {found}")
            report.target(f"{loop}, {name}: copies of 1 kB or more", len(found.copies), 0)


# --- a cache of keys and values ---------------------------------------------------------------

WINDOW, HEADS, WIDTH, TOKENS = 64, 8, 64, 4096


def decode(capacity, steps, query, keys, values):
    """Attention over the last rows of a ring of keys and values, a step at a time.

    The rows read and written are as many whatever the capacity.
    """
    offsets = jnp.arange(WINDOW)

    def body(i, carry):
        q, keys, values = carry
        keys = keys.at[i % capacity].set(jnp.cos(q))
        values = values.at[i % capacity].set(jnp.sin(q))
        rows = (i - offsets) % capacity
        k, v = keys[rows], values[rows]
        weights = jax.nn.softmax(jnp.einsum("whd,hd->hw", k, q) / WIDTH**0.5)
        return jnp.einsum("hw,whd->hd", weights, v), keys, values

    init = (query, keys, values)
    return loopkit.fori_loop(0, steps, body, init, buffers=(False, True, True))[0]


def compare_cache(report: Report, repeats: int) -> None:
    """Decoding with a cache of keys and values, of several capacities."""
    row = 2 * HEADS * WIDTH * 4
    query = jax.random.normal(jax.random.key(0), (HEADS, WIDTH))
    steps, first = TOKENS, TOKENS // 2
    for what in ("value", "gradient"):
        compiled = {}
        for megabytes in (2, 8, 32, 128):
            capacity = megabytes * 2**20 // row
            cache = jnp.zeros((capacity, HEADS, WIDTH))
            for count in (steps, first):

                def run(query, keys, values, capacity=capacity, count=count):
                    return jnp.sum(decode(capacity, count, query, keys, values) ** 2)

                function = jax.grad(run) if what == "gradient" else run
                args = query, cache, cache
                program = jax.jit(function).lower(*args).compile()
                compiled[megabytes, count] = partial(program, *args)
        times = interleave(compiled, repeats)
        # Of the second half of the steps: what a call costs besides, as a copy of the cache, is
        # taken off.
        each = {
            m: [
                (a - b) / (steps - first)
                for a, b in zip(times[m, steps], times[m, first], strict=True)
            ]
            for m, count in compiled
            if count == steps
        }
        report.write(f"\n### {what}, {steps} steps\n")
        report.write("| cache | time of a step |\n| --- | --- |")
        for m, seconds in each.items():
            report.write(f"| {m} MB | {1e6 * median(seconds):.3g} us |")
        report.write()
        for m in (8, 32, 128):
            against = ratio(each[m], each[2])
            report.target(f"{what}: a step with a cache of {m} MB by one with 2 MB", against, 1.2)


# --- many small leaves ------------------------------------------------------------------------


def many_leaves(loop, count, steps, init):
    def body(i, xs):
        return [x + jnp.sin(y) * 0.1 for x, y in zip(xs, [*xs[1:], xs[0]], strict=True)]

    return loop(0, steps, body, init)


def packed(count, steps, init):
    def body(i, x):
        return x + jnp.sin(jnp.roll(x, -1)) * 0.1

    return list(loopkit.fori_loop(0, steps, body, jnp.stack(init)))


def compare_leaves(report: Report, repeats: int) -> None:
    """A carry of many scalars, and the same in one array."""
    steps = 2000
    for count in (8, 64, 256):
        init = [jnp.float32(i) for i in range(count)]
        functions = {
            "packed by hand": partial(packed, count, steps),
            "lax.fori_loop": partial(many_leaves, lax.fori_loop, count, steps),
            "loopkit.fori_loop": partial(many_leaves, loopkit.fori_loop, count, steps),
        }
        report.write(f"\n### {count} scalars, {steps} steps\n")
        report.write(measurement_table(measure(functions, (init,), repeats), "packed by hand"))
        grads = {
            name: jax.grad(lambda v, f=f: sum(f(v)))
            for name, f in functions.items()
            if name != "lax.fori_loop"
        }
        grads["lax.fori_loop"] = jax.grad(
            lambda v, count=count: sum(many_leaves(lax.fori_loop, count, steps, v))
        )
        report.write(f"\n### {count} scalars, gradient\n")
        report.write(measurement_table(measure(grads, (init,), repeats), "packed by hand"))


SECTIONS = {
    "rows": ("Rows written to the carry", compare_rows),
    "overwriting": ("Rows that are overwritten", compare_overwriting),
    "in_place": ("Copies", check_in_place),
    "cache": ("A cache of keys and values", compare_cache),
    "leaves": ("Many small leaves", compare_leaves),
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    report = Report()
    report.write(describe_machine())
    for section in options.only.split(","):
        title, run = SECTIONS[section]
        report.write(f"\n## {title}\n")
        run(report, options.repeats)
    report.summary()
    if options.markdown:
        options.markdown.write_text("\n".join(report.lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
