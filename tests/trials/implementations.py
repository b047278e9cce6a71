"""Whose loops a program runs: what they are called there, and what they cannot do by contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox.internal as eqxi
from jax import lax

import loopkit
from loopkit._jax import SCAN_KEEPS_RULES
from trials.programs import Program
from trials.transformations import DERIVATIVES, REPLACED, REVERSE

OWN = frozenset(
    {
        "until",
        "axes",
        "some ys",
        "truncate",
        "checkpointed",
        "list",
        "max_steps",
        "return_info",
        "infinite slope",
        "static leaves",
    }
)
"""Options of loopkit's loops that lax's loops do not have."""
COUNTED = "scan", "fori_loop"


@dataclass(frozen=True)
class Implementation:
    name: str
    loops: Any
    lacks: frozenset[str] = frozenset()
    wrap: Callable[[Callable], Callable] = lambda program: program

    def function(self, program: Program) -> Callable:
        own = {"loopkit": self.loops} if hasattr(self.loops, "TensorArray") else {}
        return self.wrap(program.function({"loops": self.loops} | own))

    def cannot(self, program: Program, pattern: str, outside: str) -> str | None:
        """Name what this implementation does not promise of a program."""
        for tag in sorted(program.tags & self.lacks):
            return tag
        letters = [letter for letter in pattern if letter in DERIVATIVES]
        if self.name != "loopkit" and outside == "disable_jit":
            return "no step without jit"
        if self.name == "lax" and "while" in program.tags and set(letters) & set(REVERSE):
            return "reverse mode of while loops"
        if self.name != "loopkit" and set(pattern) & set(REPLACED):
            return "loops of lax replaced in part"
        if self.name != "loopkit" and "s" in pattern:
            return "carries that become varying"
        if letters[1:] and not SCAN_KEEPS_RULES and "custom_jvp" in program.tags:
            loops = ("lax.", "loops.") if self.name == "lax" else ("lax.",)
            if any(f"{where}{kind}(" in program.body for where in loops for kind in COUNTED):
                return "second derivatives of a scan of lax by custom rules"
        if "o" in pattern and letters[1:] and not SCAN_KEEPS_RULES:
            return "derivatives of pullbacks that lax.map has stacked"
        if self.name == "equinox" and (letters[1:] or set(letters) - set(REVERSE)):
            return "other modes than one reverse"
        return None


class LaxLoops:
    """Buffers are arrays, and options that change no number are left out."""

    def while_loop(self, goes_on, body, init, **_):
        return lax.while_loop(goes_on, body, init)

    def fori_loop(self, lower, upper, body, init, **_):
        return lax.fori_loop(lower, upper, body, init)

    def scan(self, f, init, xs, length, reverse=False, **_):
        return lax.scan(f, init, xs, length, reverse)


class EquinoxLoops:
    """The loops of `equinox.internal`, checkpointed."""

    def while_loop(self, goes_on, body, init, max_steps=None, **_):
        return eqxi.while_loop(
            goes_on, body, init, max_steps=max_steps, kind="checkpointed", checkpoints=3
        )

    def fori_loop(self, lower, upper, body, init, **_):
        step = lambda c: (c[0] + 1, body(c[0], c[1]))
        return self.while_loop(lambda c: c[0] < upper, step, (lower, init))[1]

    def scan(self, f, init, xs, length, **_):
        return eqxi.scan(f, init, xs, length, kind="checkpointed")


IMPLEMENTATIONS = {
    entry.name: entry
    for entry in (
        Implementation("loopkit", loopkit),
        Implementation("lax", LaxLoops(), OWN),
        Implementation("equinox", EquinoxLoops(), OWN | {"reverse", "buffers"}),
        Implementation("checkpointed", LaxLoops(), OWN, loopkit.checkpointed),
    )
}
