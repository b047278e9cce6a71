"""Transformations of a program, in any order: each letter makes a function of (x, others) of
another.

x is an array of float64, in which derivatives are taken; `others` a dict of arrays for which there
are none. Those that change no number are the identity of the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import loopkit
from trials.draws import Draws
from trials.programs import Program


def direction(like: Any, seed: int) -> Any:
    made = jnp.cos(jnp.arange(like.size) * 1.7 + seed).reshape(like.shape)
    varying = tuple(jax.typeof(like).manual_axis_type.varying)  # between devices
    return jax.lax.pcast(made, varying, to="varying") if varying else made


def vector(outputs: Any) -> Any:
    """All inexact numbers of a tree, in one vector of float64."""
    parts = []
    for leaf in jax.tree.leaves(outputs):
        if jnp.iscomplexobj(leaf):
            parts += [leaf.real, leaf.imag]
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
            parts.append(leaf)
    return jnp.concatenate([part.ravel().astype("float64") for part in parts])


def forward(g: Callable, seed: int) -> Callable:
    """J(x) v"""
    return lambda x, o: jax.jvp(lambda x: g(x, o), (x,), (direction(x, seed),))[1]


def linearized(g: Callable, seed: int) -> Callable:
    """J(x) v, in two parts."""
    return lambda x, o: jax.linearize(lambda x: g(x, o), x)[1](direction(x, seed))


def reverse(g: Callable, seed: int) -> Callable:
    """J(x)^T w"""

    def pulled_back(x, o):
        y, pullback = jax.vjp(lambda x: g(x, o), x)
        return pullback(direction(y, seed))[0]

    return pulled_back


def jacobian_forward(g: Callable, seed: int) -> Callable:
    return lambda x, o: jax.jacfwd(lambda x: g(x, o))(x)


def jacobian_reverse(g: Callable, seed: int) -> Callable:
    return lambda x, o: jax.jacrev(lambda x: g(x, o))(x)


def lanes(g: Callable, seed: int) -> Callable:
    return jax.vmap(g)


def lanes_in_step(g: Callable, seed: int) -> Callable:
    """Others in common: where loops end by them they end together."""
    return lambda x, o: jax.vmap(g, (0, None))(x, {k: v[0] for k, v in o.items()})


def lanes_of_one(g: Callable, seed: int) -> Callable:
    """Floats in common, but for what lanes differ in."""
    return lambda x, o: jax.vmap(g, (None, 0))(x[0], o)


def one_by_one(g: Callable, seed: int) -> Callable:
    """J(x)^T w of each lane: run one at a time, and pulled back together."""

    def run(x, o):
        run_one = lambda lane: jax.vjp(lambda x: g(x, lane[1]), lane[0])
        y, pullbacks = jax.lax.map(run_one, (x, o))
        return jax.vmap(lambda pullback, y: pullback(direction(y, seed))[0])(pullbacks, y)

    return run


def shards(g: Callable, seed: int) -> Callable:
    """A lane on each device; all on the same, if there are too few."""

    def on_device(x, o):
        return g(x[0], {k: v[0] for k, v in o.items()})[None]

    def run(x, o):
        if jax.device_count() < x.shape[0]:
            return jax.vmap(g)(x, o)
        mesh = Mesh(np.array(jax.devices()[: x.shape[0]]), ("d",))
        how = {"mesh": mesh, "in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d")}
        try:
            return jax.shard_map(on_device, **how)(x, o)
        except (TypeError, ValueError) as error:
            # JAX asks for casts where a constant meets what varies; 0.10 casts twice where lanes
            # of a cond differ.
            said = ["manual axis", "varying over"]
            said += ["pvary is a invariant"] if jax.__version__.startswith("0.10.") else []
            if not any(text in str(error) for text in said):
                raise
            return jax.shard_map(on_device, **how, check_vma=False)(x, o)

    return run


def jitted(g: Callable, seed: int) -> Callable:
    return jax.jit(g)


def rematerialized(g: Callable, seed: int) -> Callable:
    return jax.checkpoint(g)


def replaced(g: Callable, seed: int) -> Callable:
    """The loops of lax in it are loopkit's."""
    return loopkit.checkpointed(g)


def replaced_with_two(g: Callable, seed: int) -> Callable:
    return loopkit.checkpointed(g, checkpoints=2)


def replaced_outside(g: Callable, seed: int) -> Callable:
    outside = lambda site: site.kind != "scan" or site.depth == 0
    return loopkit.checkpointed(g, only=outside, strict=False)


def replaced_inside(g: Callable, seed: int) -> Callable:
    return loopkit.checkpointed(g, only=lambda site: site.depth > 0, strict=False)


def within_bytes(g: Callable, seed: int) -> Callable:
    return _within(g, 50_000)


def within_least(g: Callable, seed: int) -> Callable:
    """Its gradient has the fewest bytes that will do: code runs again."""
    return _within(g, 1)


def _within(g: Callable, memory: int) -> Callable:
    """Within so many bytes or, if they are refused, within those that the error names."""

    def run(x: jax.Array, *others: Any) -> Any:
        few = loopkit.checkpointed(g, memory=memory)

        def gradient(x: jax.Array) -> Any:
            y, pull = jax.vjp(lambda x: few(x, *others), x)
            return pull(jax.tree.map(jnp.zeros_like, y))

        try:
            jax.eval_shape(gradient, x)
        except ValueError as error:
            if (least := re.search(r"`memory` must be at least (\d+) bytes", str(error))) is None:
                raise
            return loopkit.checkpointed(g, memory=int(least[1]))(x, *others)
        return few(x, *others)

    return run


def within_measured_bytes(g: Callable, seed: int) -> Callable:
    return loopkit.checkpointed(g, memory="1 MB", measure=True)


LETTERS: dict[str, Callable] = {
    "f": forward,
    "l": linearized,
    "r": reverse,
    "F": jacobian_forward,
    "R": jacobian_reverse,
    "v": lanes,
    "w": lanes_in_step,
    "u": lanes_of_one,
    "s": shards,
    "o": one_by_one,
    "j": jitted,
    "c": rematerialized,
    "k": replaced,
    "2": replaced_with_two,
    "O": replaced_outside,
    "I": replaced_inside,
    "b": within_bytes,
    "m": within_measured_bytes,
    "B": within_least,
}
LANES = "vwuso"
DERIVATIVES = "flrFRo"
REVERSE = "rRo"
BUDGETS = "bmB"
"""Letters by which code outside of loops may run again, too."""
REPLACED = "k2OI" + BUDGETS
"""Letters by which loopkit replaces loops of lax."""
SAME = "cj" + REPLACED
"""Letters that change no number."""


def through(g: Callable, pattern: str) -> Callable:
    """`g` through the letters, the first one first."""
    for seed, letter in enumerate(pattern):
        g = LETTERS[letter](g, seed)
    return g


def draw_pattern(d: Draws, program: Program) -> str:
    """One that the program can go through by what JAX promises."""
    tags = program.tags
    order = d.weighted({1: 50, 2: 32, 0: 8, 3: 10})
    # The program of a second derivative is ten times as long, and that of a third again so.
    order = min(order, 3 if len(program.body) < 1000 else 2 if len(program.body) < 2500 else 1)
    if "long" in tags:
        order = min(order, 2 if len(program.body) < 1500 else 1)
    if "scatter of extrema" in tags and jax.__version__.startswith("0.10."):
        order = min(order, 1)  # its second derivative is NaN there, without any loop
    if "custom_vjp" in tags and tags & {"no bound", "host"}:
        order = min(order, 1)
    letters = []
    for at in range(order):
        some = {"r": 5, "f": 3, "l": 1} | ({"R": 1, "F": 1} if order < 3 and at == 0 else {})
        if "custom_vjp" in tags and at == 0:
            some = {"r": 4, "R": 1}
        if "io_callback" in tags:
            some.pop("F", None)  # refused in a `cond` under vmap, which this is
        letters.append(d.weighted(some))
    if d.chance(55):
        ways = {"v": 5, "u": 3, "w": 2, "s": 2}
        if "bad branch" in tags:
            ways = {"s": 2}  # under vmap both branches are taken, by JAX's own word
        if "pullback that is not linear" in tags:
            ways = {k: n for k, n in ways.items() if k != "u"}
        if tags & {"callback", "host", "measured"}:
            ways = {k: n for k, n in ways.items() if k != "s"}
        one_by_one = [at for at, letter in enumerate(letters) if letter == "r"]
        if one_by_one and "v" in ways and "io_callback" not in tags and d.chance(20):
            letters[d.choice(one_by_one)] = "o"
        elif ways and "io_callback" not in tags:
            letters.insert(d.number(0, len(letters)), d.weighted(ways))
    for letter in "cj":
        if d.chance(15) and not (letter == "c" and "io_callback" in tags):
            letters.insert(d.number(0, len(letters)), letter)
    if d.chance(40 if "layers" in tags else 15):
        letter = d.choice(BUDGETS if "layers" in tags else REPLACED)
        inside = letters.index("s") + 1 if letter == "m" and "s" in letters else 0
        letters.insert(d.number(inside, len(letters)), letter)
    if set(letters) & set("lrRo") and "lax's while" in tags:
        letters.insert(0, "k")  # of its own it has no reverse mode
    return "".join(letters)


OUTSIDE = {"jit": 88, "donation": 5, "export": 4, "disable_jit": 3}


ON_THIS_HOST = frozenset(["callback", "list", "checks", "throw", "host", "progress", "debug"])


def draw_outside(d: Draws, program: Program, pattern: str) -> str:
    way = d.weighted(OUTSIDE)
    if way == "export" and (program.tags & ON_THIS_HOST or "s" in pattern):
        return "jit"
    not_without = {"list", "lax's scan of no steps"}  # lax says so
    if way == "disable_jit" and (program.tags & not_without or set(pattern) & set("sjFo")):
        return "jit"
    return way


def run(function: Callable, x: Any, others: Any, way: str) -> Any:
    """Run a function of arrays, as a whole in one of several ways."""
    if way == "disable_jit":
        with jax.disable_jit():
            return function(x, others)
    if way == "export":
        exported = jax.export.export(jax.jit(function))(x, others)
        return jax.export.deserialize(exported.serialize()).call(x, others)
    if way == "donation":
        return jax.jit(function, donate_argnums=0)(jnp.array(x), others)
    return jax.jit(function)(x, others)
