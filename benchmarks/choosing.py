"""The tables of docs/choosing.md: which loop when.

python benchmarks/choosing.py [--only truncated,code,axes,blocks,ys,tracing]
"""

import argparse
import contextlib
import functools as ft
import gc
import time
from statistics import median

import jax
import jax.numpy as jnp
from jax import lax

import contenders as run
import findings
import harness
import loopkit
import workloads
from loopkit import _programs as cache
from loopkit._tracing import axes as _axes


def show(title: str, results: dict, baseline: str) -> None:
    print(f"\n### {title}\n")
    print(harness.measurement_table(results, baseline), flush=True)


def gradient(loop, load, bound):
    def loss(params, init, n):
        return jnp.sum(loop(load.body, params, init, n, bound) ** 2)

    return jax.grad(loss, argnums=(0, 1))


# --- truncated gradients ---------------------------------------------------------------------


def truncated(repeats: int) -> None:
    """A gradient that is stopped in the carry: it is another gradient, so it is not compared."""

    def scan(**settings):
        def loop(body, params, init, n, bound):
            step = lambda x, _: (body(params, x), None)
            return loopkit.scan(step, init, length=bound, **settings)[0]

        return loop

    loops = {"loopkit.scan": scan(), "loopkit.scan, truncate=50": scan(truncate=50)}
    for name in ("mlp", "vector"):
        load = workloads.make(name)
        functions = {k: gradient(loop, load, load.steps) for k, loop in loops.items()}
        results = harness.measure(
            functions, (load.params, load.init, load.steps), repeats, rtol=float("inf")
        )
        show(f"A truncated gradient of {load.steps} steps of {name}", results, "loopkit.scan")


# --- code that you cannot edit ---------------------------------------------------------------


def code(repeats: int) -> None:
    """`checkpointed` of a function that calls lax.scan or lax.while_loop."""
    for name in ("mlp", "vector"):
        load = workloads.make(name)
        fixed = lambda p, x, n, load=load: run.lax_scan(load.body, p, x, n, load.steps)
        free = lambda p, x, n, load=load: run.lax_while_loop(load.body, p, x, n, load.steps)
        functions = {
            "lax.scan": fixed,
            "checkpointed, of the scan": loopkit.checkpointed(fixed),
            "checkpointed, checkpoints=8": loopkit.checkpointed(fixed, checkpoints=8),
            "checkpointed, of a while_loop": loopkit.checkpointed(free),
        }

        def slope(f):
            return jax.grad(lambda p, x, n: jnp.sum(f(p, x, n) ** 2), argnums=(0, 1))

        results = harness.measure(
            {k: slope(f) for k, f in functions.items()},
            (load.params, load.init, load.steps),
            repeats,
        )
        show(f"Gradient of {load.steps} steps of {name}", results, "lax.scan")


# --- axes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def placed(rule):
    """Slice every array inside as `rule(type, axis)` says."""
    usual, _axes.in_place = _axes.in_place, rule
    cache._traced.clear()  # programs traced under another rule
    try:
        yield
    finally:
        _axes.in_place = usual
        cache._traced.clear()


def axes(repeats: int) -> None:
    """Scans over the second axis: sliced in place, or transposed first, and loopkit's choice."""
    rows = []
    rules = {"sliced in place": lambda _, axis: axis, "transposed": lambda _, axis: 0}
    shapes = [(32, 512, 64), (32, 512, 8), (256, 1024), (4096, 256), (65536, 64), (200_000, 64)]

    def cumulated(x):
        step = lambda total, x: (0.9 * total + x, total)
        zeros = jnp.zeros_like(x[:, 0])
        return loopkit.scan(step, zeros, x, in_axes=1, out_axes=1, checkpoints="all")[1]

    for shape in shapes:
        for what, f in (
            ("value", cumulated),
            ("gradient", jax.grad(lambda x: jnp.sum(cumulated(x) ** 2))),
        ):
            x = jax.random.normal(jax.random.key(0), shape)
            calls = {}
            for name, rule in rules.items():
                with placed(rule):
                    compiled = jax.jit(lambda x, f=f: f(x)).lower(x).compile()
                calls[name] = ft.partial(compiled, x)
            seconds = harness.interleave(calls, repeats)
            chosen = "in place" if _axes.in_place(jax.typeof(x), 1) else "transposed"
            times = [findings.show_seconds(median(s)) for s in seconds.values()]
            against = harness.ratio(*seconds.values())
            rows.append((f"{'x'.join(map(str, shape))}, {what}", *times, str(against), chosen))
    print("\n### Scanning the second axis\n")
    print(
        findings.table(("float32", *rules, "in place over transposed", "chosen"), rows), flush=True
    )


# --- blocks ----------------------------------------------------------------------------------


def blocks(repeats: int, sequences: int = 50_000, steps: int = 100) -> None:
    """A recurrence along each sequence of a large batch."""

    def smoothed(x):
        step = lambda total, x: (0.9 * total + x / (1 + x * x), total)
        zeros = jnp.zeros_like(x[:, 0])
        kept = {"in_axes": 1, "out_axes": 1, "checkpoints": "all"}
        _, forth = loopkit.scan(step, zeros, x, **kept)
        return loopkit.scan(step, zeros, forth, reverse=True, **kept)[1]

    x = jax.random.normal(jax.random.key(0), (sequences, steps))
    functions = {
        "whole": smoothed,
        "blocked": loopkit.blocked(smoothed),
        **{f"block={n}": loopkit.blocked(smoothed, block=n) for n in (16, 128, 1000, 10_000)},
        "lax.map, batch_size=128": lambda x: lax.map(
            lambda x: smoothed(x[None])[0], x, batch_size=128
        ),
    }
    show(f"{sequences} sequences of {steps}", harness.measure(functions, (x,), repeats), "whole")
    slopes = {k: jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)) for k, f in functions.items()}
    show("Its gradient", harness.measure(slopes, (x,), repeats), "whole")


# --- some ys ---------------------------------------------------------------------------------


def ys(repeats: int, steps: int = 10_000, every: int = 100) -> None:
    """Some of a scan's ys, or their sum: selected from all ys, or kept by the scan alone."""

    def step(x, _):
        x = x + 0.1 * jnp.sin(x)
        return x, jnp.cos(x)

    def of(then=lambda ys: ys, **how):
        return lambda x: then(loopkit.scan(step, x, length=steps, **how)[1])

    def scan_of_scans(x):
        last = lambda x, _: loopkit.scan(step, x, length=every, reduce="last")
        return loopkit.scan(last, x, length=steps // every)[1]

    windows = lambda ys: ys.reshape(-1, every, *ys.shape[1:])
    x = jnp.linspace(0.0, 1.0, 1000)
    for functions in (
        {
            "ys[k - 1::k]": of(lambda ys: ys[every - 1 :: every]),
            f"every={every}": of(every=every),
            f"a scan of scans of {every}": scan_of_scans,
        },
        {
            "means of ys": of(lambda ys: jnp.mean(windows(ys), 1)),
            f'every={every}, reduce="mean"': of(every=every, reduce="mean"),
        },
        {"sum of ys": of(lambda ys: jnp.sum(ys, 0)), 'reduce="sum"': of(reduce="sum")},
    ):
        first = next(iter(functions))
        slopes = {k: jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)) for k, f in functions.items()}
        show(first, harness.measure(functions, (x,), repeats), first)
        show(f"{first}, gradient", harness.measure(slopes, (x,), repeats), first)


# --- the cost of tracing ---------------------------------------------------------------------


def tracing(repeats: int) -> None:
    """`checkpointed` against `jax.make_jaxpr`, and what it costs where there is no loop."""
    load = workloads.make("mlp")

    def loops(count):
        def f(params, x):
            for _ in range(count):
                x = run.lax_scan(load.body, params, x, 100, 100)
                x = run.lax_while_loop(load.body, params, x, 100, 100)
            return x

        return f

    def plain(params, x):
        for _ in range(50):
            x = load.body(params, x)
        return x

    arguments = load.params, load.init
    rows = []
    for name, f in {"no loops": plain, "2 loops": loops(1), "20 loops": loops(10)}.items():
        ways = {
            "make_jaxpr": lambda f=f: jax.make_jaxpr(lambda *a: f(*a))(*arguments),
            "of checkpointed": lambda f=f: jax.make_jaxpr(loopkit.checkpointed(lambda *a: f(*a)))(
                *arguments
            ),
        }
        seconds = {way: [] for way in ways}
        for repeat in range(3 * repeats):
            for way, call in ways.items():
                jax.clear_caches()
                gc.collect()
                start = harness.clock()
                call()
                if repeat:
                    seconds[way].append(harness.clock() - start)
        times = [findings.show_seconds(median(s)) for s in seconds.values()]
        against = harness.ratio(seconds["of checkpointed"], seconds["make_jaxpr"])
        rows.append((name, *times, str(against)))
    print("\n### Tracing\n")
    print(findings.table(("", "make_jaxpr", "of checkpointed", "ratio"), rows))

    functions = {"as it is": plain, "checkpointed": loopkit.checkpointed(plain)}
    results = harness.measure(functions, arguments, repeats)
    show("A function without loops, compiled", results, "as it is")
    texts = [jax.jit(f).lower(*arguments).compile().cost_analysis() for f in functions.values()]
    same = texts[0]["flops"] == texts[1]["flops"]
    kept = [findings.show_bytes(results[name].temp_bytes) for name in functions]
    print(f"\nthe same work: {same}; temporary memory {' and '.join(kept)}", flush=True)


SECTIONS = {
    "truncated": truncated,
    "code": code,
    "axes": axes,
    "blocks": blocks,
    "ys": ys,
    "tracing": tracing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="time of all cores, not of the clock")
    options = parser.parse_args()
    if options.cpu:
        harness.clock = time.process_time
    print(harness.describe_machine())
    for name in options.only.split(","):
        print(f"\n## {name}")
        SECTIONS[name](options.repeats)


if __name__ == "__main__":
    main()
