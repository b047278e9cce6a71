"""A trial: a program and what is done to it, against the reference.

How closely the two have to agree follows from the program. The reference is computed again with
every input, and every carry at every step, moved by `MOVED` of itself. By how much a result moves
is what roundings of that size may do to it; those of the program at hand are smaller or larger by
a known factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trials import in_numpy, reference
from trials.implementations import Implementation
from trials.programs import Program
from trials.transformations import LANES, SAME, run, through, vector

LANE_COUNT = 2
MOVED = 1e-9
ROUNDINGS = {True: 2000.0, False: 16.0}
"""So many as large as the type's, all in the same direction: with all bits, with few."""
ILL = 1e-4
"""Relative to the largest number: what is known no better is not compared, and counted."""
TIE = 1e-12
"""The part of itself by which every carry moves to see whether roundings decide about steps."""


UNKNOWN = np.errstate(invalid="ignore")
"""Infinity less infinity is NaN: not compared, and no reason for a warning."""


class Results(NamedTuple):
    value: list[Any]
    """Leaves of what the program returns, with a leading axis of lanes if there are several."""
    derived: Any
    """The result after all transformations."""


@dataclass(frozen=True, repr=False)
class Trial:
    program: Program
    pattern: str
    outside: str = "jit"
    optimized: bool = False
    """Whether the optimizing compiler runs it, which takes twice as long: in a few trials."""
    valued: bool = True
    """Whether what the program returns is compared besides, integers and all."""

    def __repr__(self) -> str:
        return f"Trial({self.pattern!r}, {self.outside!r})"

    @property
    def lanes(self) -> str:
        return next((letter for letter in self.pattern if letter in LANES), "")

    def arguments(self) -> tuple[Any, Any]:
        x, others = self.program.arguments(LANE_COUNT if self.lanes else 1)
        return (x, others) if self.lanes else (x[0], {k: v[0] for k, v in others.items()})

    def function(self, implementation: Implementation) -> Callable:
        """Return the function to run: from the arguments to the value and the derivatives."""
        f = self.program.of_vector(implementation.function(self.program))

        def both(x: Any, others: Any) -> tuple[Any, Any]:
            value = through(
                lambda x, o: jax.tree.leaves(f(x, o)),
                self.lanes.replace("s", "v").replace("o", "v"),
            )
            derived = through(lambda x, o: vector(f(x, o)), self.pattern)
            return value(x, others) if self.valued else [], derived(x, others)

        return both

    def through(self, implementation: Implementation) -> Results:
        with compiled(self.optimized):
            return Results(*run(self.function(implementation), *self.arguments(), self.outside))

    @UNKNOWN
    def expected(self) -> tuple[Results, Results]:
        """The reference, and by how much it moves if everything is moved by `MOVED`."""
        x, others = self.arguments()
        f = Reference(self.program, x, others, self.lanes)

        def both(x: Any, noise: Any) -> Results:
            f.moved_by(noise)
            x = x * (1 + noise * jnp.cos(jnp.arange(x.size) * 1.3).reshape(x.shape))
            return Results(f.value(x) if self.valued else [], f.derived(x, self.pattern))

        closed, shape = jax.make_jaxpr(both, return_shape=True)(x, 0.0)
        tree = jax.tree.structure(shape)
        once, again = (in_numpy.evaluate(closed, x, np.float64(noise)) for noise in (0.0, MOVED))
        moves = [
            np.abs(np.asarray(b, "complex128") - np.asarray(a, "complex128"))
            for a, b in zip(once, again, strict=True)
        ]
        return tree.unflatten(once), tree.unflatten(moves)

    @UNKNOWN
    def is_decided_by_roundings(self) -> bool:
        """Return whether a loop takes other steps if its carries move by `TIE`."""

        def decided(tie: float | None) -> list[list[int]]:
            reference = Reference(self.program, *self.arguments(), self.lanes, tie)
            return [decisions.made for decisions in reference.decisions]

        return not decided(None) == decided(TIE) == decided(-TIE)


@contextlib.contextmanager
def compiled(optimized: bool) -> Iterator[None]:
    """Programs that run once are not worth much optimization."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not optimized)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


class Reference:
    """The program in Python at given arguments, lane by lane."""

    def __init__(self, program: Program, x: Any, others: Any, lanes: str, tie: float | None = None):
        self.lanes = lanes
        count = len(x) if lanes else 1
        lane = lambda i: {k: v[0 if lanes == "w" else i] for k, v in others.items()}
        self.others = [lane(i) for i in range(count)] if lanes else [others]
        noise = () if tie is None else (tie, True)
        self.decisions = [reference.Decisions(*noise) for _ in range(count)]
        self.functions = [
            program.of_vector(program.function(reference.names(d), wide=True), wide=True)
            for d in self.decisions
        ]
        with in_numpy.eagerly():
            for i in range(count):
                self.run(i, x[0 if lanes == "u" else i] if lanes else x)
        for d in self.decisions:
            d.repeated = iter(())

    def run(self, lane: int, x: Any) -> Any:
        decisions = self.decisions[lane]
        if decisions.repeated is not None:
            decisions.repeated = iter(decisions.made)
        return jax.tree.leaves(self.functions[lane](x, self.others[lane]))

    def moved_by(self, noise: Any) -> None:
        for d in self.decisions:
            d.noise = noise

    def over_lanes(self, g: Callable[[int, Any], Any]) -> Callable:
        """The stack of what each lane returns."""
        if not self.lanes:
            return lambda x, _: g(0, x)

        def run(x: Any, _: Any) -> Any:
            outs = [g(i, x[0 if self.lanes == "u" else i]) for i in range(len(self.functions))]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        return run

    def value(self, x: Any) -> Any:
        return self.over_lanes(self.run)(x, None)

    def derived(self, x: Any, pattern: str) -> Any:
        at = pattern.index(self.lanes) if self.lanes else 0
        inside, after = pattern[:at], pattern[at:]
        seeds = list(enumerate(pattern))

        def of_lane(i: int, x: Any) -> Any:
            g = lambda x, _: vector(self.run(i, x))
            own = [s for s in seeds[:at] if s[1] not in SAME]
            own += [(at, "r")] if self.lanes == "o" else []
            return chain(g, own)(x, None)

        rest = [s for s in seeds[at:] if s[1] not in SAME + LANES]
        assert inside + after == pattern, "split"
        return chain(self.over_lanes(of_lane), rest)(x, None)


def chain(g: Callable, letters: list[tuple[int, str]]) -> Callable:
    from trials.transformations import LETTERS

    for seed, letter in letters:
        g = LETTERS[letter](g, seed)
    return g


class IllConditioned(Exception):
    """Nothing is left to compare."""


def compare(trial: Trial, got: Results, expected: tuple[Results, Results] | None = None) -> None:
    """An AssertionError if they differ; `IllConditioned` if not all of it is known well enough."""
    try:
        _compare(trial, got, expected)
    except AssertionError:
        if trial.is_decided_by_roundings():
            raise IllConditioned from None
        raise


@UNKNOWN
def _compare(trial: Trial, got: Results, expected: tuple[Results, Results] | None) -> None:
    wanted, moves = expected or trial.expected()
    eps = trial.program.eps
    derived = zip(
        [*got.value, got.derived],
        [*wanted.value, wanted.derived],
        [*moves.value, moves.derived],
        strict=True,
    )
    ill = False
    for at, (g, w, move) in enumerate(derived):
        what = "derived" if at == len(got.value) else f"result {at}"
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape, f"{what}: shape {g.shape}, expected {w.shape}"
        if not jnp.issubdtype(g.dtype, jnp.inexact):
            np.testing.assert_array_equal(g, w, what)
            continue
        g, w = g.astype("complex128"), w.astype("complex128")
        known = np.isfinite(w) & np.isfinite(move)
        size = np.max(np.abs(w), initial=0.0, where=known)
        tolerance = eps * ROUNDINGS[eps == 2.0**-52] * (move / MOVED + size + 1)
        limit = ILL if eps == 2.0**-52 else 0.5
        compared = known & (tolerance <= limit * (size + 1))
        ill |= not compared.all()
        wrong = compared & ~(np.abs(g - w) <= tolerance)
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0])
            raise AssertionError(
                f"{what}{list(map(int, first))} is {g[first]}, expected {w[first]} "
                f"up to {tolerance[first]:.1e}; {wrong.sum()} of {wrong.size} differ"
            )
    if ill:
        raise IllConditioned
