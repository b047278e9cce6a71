"""One loop by every function that can run it: a body of `fori_loop`, and the kind of the loop.

What a test looks at decides how a loop counts and stops, not who counts: each kind below runs
`carry = body(i, carry)` for every i from `start` to `stop`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loopkit
from reference_loops import row_of

KINDS = ("fori", "scan", "until", "while")


def loop(
    kind: str,
    body: Callable,
    init: Any,
    stop: Any,
    *,
    start: Any = 0,
    most: int | None = None,
    also: Callable | None = None,
    xs: Any = None,
    buffers: Any = None,
    loops: Any = loopkit,
    **how: Any,
) -> Any:
    """The last carry.

    stop: traced where the kind allows it; a "scan" takes all of its steps, an "until" at least one.
    most: a bound on the steps: `max_steps`, or the length of an "until".
    also: `also(i, carry)` must hold too, or an "until" or a "while" ends.
    xs: rows, of which the body gets its own as a third argument: an input of a scan, else read.
    buffers: as for `fori_loop`, in terms of `carry`.
    loops: loopkit, or lax for what it can do.
    """
    row = lambda i: () if xs is None else (row_of(xs, i - start),)
    bound = {} if most is None else {"max_steps": most}
    if kind == "fori":
        how |= {} if isinstance(stop, int) else bound
        how |= {} if buffers is None else {"buffers": buffers}
        return loops.fori_loop(start, stop, lambda i, carry: body(i, carry, *row(i)), init, **how)
    if buffers is not None:
        how["buffers"] = (lambda s: buffers(s[1])) if callable(buffers) else (False, buffers)
    goes_on = lambda s: s[0] < stop if also is None else (s[0] < stop) & also(*s)
    if kind == "while":
        step = lambda s: (s[0] + 1, body(*s, *row(s[0])))
        return loops.while_loop(goes_on, step, (start, init), **bound, **how)[1]
    if kind == "until":
        how["until"] = lambda s, _: ~goes_on(s)
    length = stop - start if most is None or kind == "scan" else most
    given = lambda x: () if xs is None else (x,)
    step = lambda s, x: ((s[0] + 1, body(*s, *given(x))), None)
    return loops.scan(step, (start, init), xs, length, **how)[0][1]
