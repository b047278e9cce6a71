"""Errors of loops that took the place of one of lax: which loop it is, and the way out.

Whoever reads such an error has not written the loop, and may not know that it is there.
"""

from __future__ import annotations

import functools as ft
import re
from collections.abc import Callable
from typing import Any

from loopkit import _jax
from loopkit._engine.loop import Loop

DERIVATIVE_ADVICE = (
    "Give that a derivative of its own (jax.custom_jvp), take none of it (jax.lax.stop_gradient), "
    "or leave the loop out with `only`."
)

ERROR_KINDS: dict[type, type[Exception]] = {
    kind: kind for kind in (NotImplementedError, TypeError, ValueError, RuntimeError)
}
ERROR_KINDS |= dict.fromkeys(
    (AssertionError, AttributeError, IndexError, KeyError), NotImplementedError
)
"""Errors that are said anew, and as what: jax's own types have more to them than a text."""


def naming_the_loop(rule: Callable) -> Callable:
    """A rule of a primitive that has a loop: its errors say which, if the loop was one of lax.

    An error of someone else's code, in a rule for derivatives that is run inside, stays as it is.
    """

    @ft.wraps(rule)
    def named(*args: Any, **params: Any) -> Any:
        try:
            return rule(*args, **params)
        except Exception as error:
            loop = params["loop"]
            if not loop.replaced_by or _is_named(error):
                raise
            kind = ERROR_KINDS.get(type(error))
            if kind is None or not _jax.is_raised_within(error):
                error.add_note(f"loopkit.{loop.replaced_by}: this is in {_place(loop)}.")
                raise
            raise kind(_message(loop, error)) from error

    return named


def _is_named(error: Exception) -> bool:
    """Whether it names a loop already, one inside."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return re.search(r"loopkit\.\w+: (this is )?in the (scan|while_loop) at", text) is not None


def _message(loop: Loop, error: Exception) -> str:
    own, text = re.match(r"loopkit\.\w+: ", str(error)), str(error)
    if own is not None:
        said = f"{text[own.end() :]} Or leave the loop out with `only`."
    else:
        why = text.split("\n")[0].rstrip(".") or type(error).__name__
        said = f"its steps cannot be differentiated: {why}. {DERIVATIVE_ADVICE}"
    return f"loopkit.{loop.replaced_by}: in {_place(loop)}: {said}"


def _place(loop: Loop) -> str:
    return f"the {loop.name} at {_jax.source()}"
