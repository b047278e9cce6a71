"""A program: drawn, compiled from its text, and printed so that it runs by itself."""

from __future__ import annotations

import functools as ft
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

import loopkit
from trials.draws import BOOL, EPS, FLOAT, INT, KEY, NARROW, Draws, Type
from trials.expressions import FREE
from trials.loops import loop
from trials.prelude import PRELUDE
from trials.steps import statements
from trials.values import scalar
from trials.writer import Writer

LOOP_CONSTRUCTS = frozenset(
    {
        "options",
        "max_steps",
        "nests",
        "deep nests",
        "static leaves",
        "watched",
        "loop of lax: while",
        "buffer",
        "list",
        "odd types",
        "axes",
        "some ys",
        "truncate",
        "until",
        "lanes",
        "layers",
        "again",
        "long loops",
    }
)
INTEGER_ARGUMENTS = {"n": INT, "m": INT, "flag": BOOL, "key": KEY}


@dataclass(frozen=True)
class Program:
    body: str
    """A function `program(<floats>, n, m, flag, key)` that returns a tuple of arrays."""
    floats: tuple[Type, ...]
    """Its arguments that are differentiated."""
    tags: frozenset[str]
    counts: Counter = field(default_factory=Counter)

    def function(self, names: dict[str, Any], wide: bool = False) -> Callable:
        """The program with JAX and loops of someone's. `wide`: with all bits, whatever it asks."""
        text = f"{PRELUDE}\n\n{self.body}"
        if wide:
            for narrow in NARROW:
                text = text.replace(f"'{narrow}'", "'float64'")
            text = text.replace("'complex64'", "'complex128'")
        scope = modules() | names
        exec(compiled(text), scope)  # what was just written
        return scope["program"]

    @property
    def eps(self) -> float:
        given = {t.dtype for t in self.floats}
        narrow = [EPS[n] for n in NARROW if f"'{n}'" in self.body or n in given]
        narrow += [EPS["float32"]] if "complex64" in self.body else []
        return max([EPS["float64"], *narrow])

    def arguments(self, lanes: int) -> tuple[np.ndarray, dict[str, Any]]:
        """Floats of each lane in rows of one matrix; the others of each."""
        size = sum(int(np.prod(t.shape)) * (1 + (t.kind == "complex")) for t in self.floats)
        random = np.random.default_rng(zlib.crc32(self.body.encode()))
        x = random.uniform(-1.2, 1.2, (lanes, size))
        others = {
            "n": random.permutation([2, 0, 4, 3, 1])[:lanes].astype("int32"),
            "m": random.permutation([3, 1, 2, 0, 4])[:lanes].astype("int32"),
            "flag": random.random(lanes) > 0.5,
            "key": np.arange(lanes, dtype="uint32") + random.integers(9, dtype="uint32"),
        }
        return x, others

    def of_vector(self, program: Callable, wide: bool = False) -> Callable:
        """`program` of a vector of all its floats and a dict of the others."""

        def run(x: Any, others: dict[str, Any]) -> tuple:
            arguments, at = [], 0
            x, others = jnp.asarray(x), jax.tree.map(jnp.asarray, others)
            for t in self.floats:
                size = int(np.prod(t.shape))
                leaf = x[at : at + size].reshape(t.shape)
                at += size
                if t.kind == "complex":
                    leaf = lax.complex(leaf, x[at : at + size].reshape(t.shape))
                    at += size
                arguments.append(leaf if wide else leaf.astype(t.dtype))
            key = jax.random.key(others["key"])
            outs = program(*arguments, *[others[k] for k in ("n", "m", "flag")], key)
            return jax.tree.map(jnp.asarray, outs)

        return run


def modules() -> dict[str, Any]:
    names = {"ft": ft, "eqx": eqx, "np": np, "jnp": jnp, "Any": Any, "NamedTuple": NamedTuple}
    names["io_callback"] = io_callback
    return names | {"jax": jax, "lax": lax, "loopkit": loopkit, "loops": loopkit}


@ft.lru_cache(maxsize=64)
def compiled(text: str) -> Any:
    return compile(text, "<program>", "exec")


def draw_program(d: Draws) -> Program:
    """Draw a program. Half of the constructs are left out, so that there are more of the others."""
    allowed = d.some(FREE | LOOP_CONSTRUCTS)
    dtypes = ("float64",) if not d.chance(20) else ("float64", d.choice(NARROW))
    w = Writer(d, allowed, dtypes, loop)
    floats = [w.some_float() for _ in range(d.number(1, 3))]
    if "odd types" in allowed and d.chance(30):
        floats.append(Type("complex128", d.choice(((), (3,)))))
    names = [w.add(w.name("a"), t).name for t in floats]
    for name, kind in INTEGER_ARGUMENTS.items():
        w.add(name, kind)
    start = len(w.variables)
    w.lines.append(f"def program({', '.join([*names, *INTEGER_ARGUMENTS])}):")
    known = [name for name, t in zip(names, floats, strict=True) if t == FLOAT.of(t.shape)]
    if known and "large product" in allowed:
        w.matrix = "matrix"
        w.line(f"matrix = large(fit({known[0]}, (3,), 'float64'))")
    statements(w, 1)
    for _ in range(1 if not d.chance(10) else 2):
        loop(w)
    statements(w, 1)
    w.line(f"return {', '.join(results(w, start))},")
    return Program("\n".join(w.lines), tuple(floats), frozenset(w.tags), d.counts)


def results(w: Writer, start: int) -> list[str]:
    """Return the latest few values, all integers and bools, and a number that depends on all
    loops."""
    made = [v for v in w.variables[start:] if not v.buffer and v.type.kind != "key"]
    floats = [v.name for v in made if v.type.kind == "float" and 0 not in v.type.shape]
    terms = [f"jnp.sum(jnp.sin({name}))" for name in floats[-10:]] or [scalar(w)]
    total = w.let(f"jnp.asarray({' + '.join(terms)}, 'float64')", FLOAT).name
    latest = [v.name for v in made[-4:]]
    whole = [v.name for v in made if v.type.kind in ("int", "bool") and v.name not in latest]
    return [*latest, *whole, f"{total} * {total} / {len(terms)}"]
