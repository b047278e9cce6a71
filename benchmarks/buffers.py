"""Buffers: rows written to the carry, overwritten, read back; against lax.scan and equinox.

python benchmarks/buffers.py
python benchmarks/buffers.py --only rows,cache --repeats 15 --markdown buffers.md
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

import loopkit
from findings import Record, spread
from harness import (
    describe_machine,
    interleave,
    keep_memory,
    measure,
    ratio,
    recorded,
    temp_bytes,
)
from report import Report

LENGTHS = 1000, 8000, 64000
LENGTHS_OF_MANY = 1000, 4000, 16000  # for 32 lanes: 64000 rows are 400 MB an array
LAX = "lax.scan, stacked ys"


def second(carry):
    return carry[1]


# --- rows of 10x5 written to the carry --------------------------------------------------------


def rows_in_carry(loop, xs):
    """Return the sum of T rows that a loop writes into its carry; T is that of the rows it
    reads."""

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
    LAX: rows_stacked,
    "loopkit.scan": partial(rows_in_carry, loopkit_scan),
    "loopkit.while_loop": partial(rows_in_carry, loopkit_while),
    "loopkit.scan, every step": partial(rows_in_carry, partial(loopkit_scan, checkpoints="all")),
    "equinox": partial(rows_in_carry, equinox_scan),
    "equinox, every step": partial(rows_in_carry, partial(equinox_scan, checkpoints="all")),
}


def gradient(function, batch):
    g = jax.grad(function)
    return jax.vmap(g) if batch > 1 else g


def compare_rows(
    report: Report, repeats: int, batch: int = 1, lengths: Sequence[int] = LENGTHS
) -> None:
    """Gradients of rows written once."""
    lanes = (batch,) if batch > 1 else ()
    functions = {name: gradient(f, batch) for name, f in CONTENDERS.items()}
    growth = {}
    for t in lengths:
        xs = jax.random.uniform(jax.random.key(0), (*lanes, t, 10, 5))
        growth[t] = measure(functions, (xs,), repeats)
        report.write(f"\n### {t} rows, batch of {batch}\n")
        report.measured(recorded(f"{t:,} rows, batch of {batch}", growth[t], LAX))
    first, last = growth[lengths[0]], growth[lengths[-1]]
    limit = 1.25 * lengths[-1] / lengths[0]
    # Long arrays are not in the caches, which costs whoever writes them.
    of_lax = ratio(last[LAX].seconds, first[LAX].seconds).mid
    for name in ("loopkit.scan", "loopkit.while_loop"):
        what = f"{name}, batch {batch}, {lengths[-1]} rows by {lengths[0]}"
        grown = ratio(last[name].seconds, first[name].seconds)
        report.target(f"{what}: time", grown, limit)
        report.target(f"{what}: time, by that of lax.scan", grown.mid / of_lax, 1.25)
        memory = last[name].temp_bytes / first[name].temp_bytes
        report.target(f"{what}: memory", memory, limit)
        for t in lengths:
            at_most = {LAX: 1.5, "equinox": 0.8, "equinox, every step": 0.8}
            for other, most in at_most.items():
                against = ratio(growth[t][name].seconds, growth[t][other].seconds)
                report.target(f"{name}, batch {batch}, {t} rows, by {other}", against, most)


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
            compiled = {n: jax.jit(jax.grad(f)).lower(xs).compile() for n, f in functions.items()}
            seconds = interleave({n: partial(c, xs) for n, c in compiled.items()}, repeats)
            what, once = f"{t:,} rows, checkpoints={checkpoints!r}", "written once"
            report.write(f"\n### {what}\n")
            report.measured(
                [
                    Record(
                        what,
                        name,
                        seconds=spread(seconds[name]),
                        ratio=ratio(seconds[name], seconds[once]),
                        over=once,
                        temp_bytes=temp_bytes(program),
                    )
                    for name, program in compiled.items()
                ]
            )
            against = ratio(seconds["overwritten"], seconds[once])
            report.target(f"overwriting, {what}: time by that of writing once", against, 1.6)


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
        # The second half of the steps counts: the other costs of a call, as a copy of the cache,
        # are taken off.
        each = {
            m: [
                (a - b) / (steps - first)
                for a, b in zip(times[m, steps], times[m, first], strict=True)
            ]
            for m, count in compiled
            if count == steps
        }
        report.write(f"\n### {what}, {steps} steps\n")
        report.measured(
            [
                Record(f"{what} of a step", f"{m} MB", spread(s), ratio(s, each[2]), "2 MB")
                for m, s in each.items()
            ]
        )
        for m in (8, 32, 128):
            against = ratio(each[m], each[2])
            report.target(f"{what}: a step with a cache of {m} MB by one with 2 MB", against, 1.2)


# --- many small leaves ------------------------------------------------------------------------

LEAVES, STEPS = (10, 60, 240), 600


def neighbours(xs):
    """Return a step of a list of leaves: each moves by the two that follow it."""
    following = zip(xs, [*xs[1:], xs[0]], [*xs[2:], *xs[:2]], strict=True)
    return [x + 0.01 * jnp.sin(y) * z for x, y, z in following]


def as_leaves(loop, init):
    out, _ = loop(lambda xs, _: (neighbours(xs), None), init, None, STEPS)
    return sum(jnp.sum(x**2) for x in out)


def as_packed(loop, init):
    """Carried as one array, taken apart and put together by each step."""
    step = lambda xs, _: (jnp.stack(neighbours(list(xs))), None)
    return jnp.sum(loop(step, jnp.stack(init), None, STEPS)[0] ** 2)


def as_array(loop, init):
    """Computed as one array."""
    step = lambda x, _: (x + 0.01 * jnp.sin(jnp.roll(x, -1, 0)) * jnp.roll(x, -2, 0), None)
    return jnp.sum(loop(step, jnp.stack(init), None, STEPS)[0] ** 2)


def compare_leaves(report: Report, repeats: int) -> None:
    """A carry of many small arrays; the same packed into one; and the same computed as one."""
    every = partial(loopkit.scan, checkpoints="all")
    for count in LEAVES:
        init = [jnp.sin(jnp.arange(3.0) + i) for i in range(count)]
        values = {
            "lax.scan": partial(as_leaves, lax.scan),
            "loopkit.scan": partial(as_leaves, loopkit.scan),
            "loopkit.scan, packed": partial(as_packed, loopkit.scan),
            "loopkit.scan, one array": partial(as_array, loopkit.scan),
        }
        stored = {
            "loopkit.scan, all": partial(as_leaves, every),
            "loopkit.scan, all, packed": partial(as_packed, every),
        }
        report.write(f"\n### {count} leaves of 3 numbers, {STEPS} steps: value\n")
        results = measure(values, (init,), repeats)
        report.measured(recorded(f"{count} leaves, value", results, "lax.scan"))
        grads = {name: jax.grad(f) for name, f in {**values, **stored}.items()}
        report.write(f"\n### {count} leaves: gradient\n")
        results = measure(grads, (init,), repeats)
        report.measured(recorded(f"{count} leaves, gradient", results, "lax.scan"))


SECTIONS = {
    "rows": ("Rows written to the carry", compare_rows),
    "rows4": ("Rows written to the carry, batch of 4", partial(compare_rows, batch=4)),
    "rows32": (
        "Rows written to the carry, batch of 32",
        partial(compare_rows, batch=32, lengths=LENGTHS_OF_MANY),
    ),
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
    parser.add_argument("--as-it-is", action="store_true", help="leave the environment as it is")
    options = parser.parse_args(argv)
    if not options.as_it_is:
        keep_memory()
    report = Report()
    report.write(describe_machine())
    for section in options.only.split(","):
        title, run = SECTIONS[section]
        report.write(f"\n## {title}\n")
        run(report, options.repeats)
    report.summary()
    report.save(options.markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
