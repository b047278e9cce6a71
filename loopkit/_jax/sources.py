"""The lines of code that loops and errors come from."""

from __future__ import annotations

import contextlib
import functools as ft
import os
import sys
from typing import Any

import jax
from jax._src import source_info_util as source_info

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of this library: what users wrote is outside."""
INNER = tuple(
    os.path.join("jax", "_src", name)
    for name in (
        "lax",
        "core.py",
        "source_info_util.py",
        "traceback_util.py",
        "custom_derivatives.py",
        "hijax.py",
        "api.py",
    )
)
"""Files that loops go through, or the rules in which they stand."""
_TOOLS = ft.__file__, contextlib.__file__, "<"  # generated code
WITHIN = PACKAGE, os.path.join(os.path.dirname(jax.__file__), ""), *_TOOLS
"""The folders that hold the code of jax and loopkit, and the tools that run it."""

_BETWEEN = {
    "jax/_src": (
        "core",
        "hijax",
        "linear_util",
        "traceback_util",
        "api_util",
        "pjit",
        "profiler",
        "util",
        "dispatch",
    ),
    "interpreters": ("ad", "batching", "partial_eval", "remat", "mlir", "pxla"),
    "control_flow": ("loops", "common"),
    "loopkit/_jax": ("jaxprs", "lax_loops", "primitives"),
    "loopkit/_foreign": ("replace",),
    "": ("contextlib",),
}
MACHINERY = tuple(
    os.path.join(*folder.split("/"), *f"{name}.py".split("/"))
    for folder, names in _BETWEEN.items()
    for name in names
)
"""Files of what stands between a loop that someone calls, or a rule makes, and its primitive."""


def source_of(eqn: Any | None) -> tuple[str, int, str] | None:
    """File, line and function outside jax and loopkit that made an equation.

    Without one, of the code being traced; of a loop inside one of jax's own, jax's function.
    """
    info = source_info.current() if eqn is None else eqn.source_info
    for frame in source_info.user_frames(info.traceback):
        if not frame.file_name.startswith(PACKAGE):
            return frame.file_name, frame.start_line, frame.function_name
    for frame in [] if info.traceback is None else info.traceback.frames:
        inner = any(part in frame.file_name for part in (PACKAGE, *INNER))
        if not inner and not frame.file_name.endswith(MACHINERY):
            return frame.file_name, frame.line_num, frame.function_name
    return None if eqn is not None else _caller()


def _caller() -> tuple[str, int, str] | None:
    """Return who called jax or loopkit, if a traceback of jax begins further in."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(WITHIN):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def source() -> str:
    """`file:line (function)` of the code being traced, outside jax and loopkit."""
    found = source_of(None)
    return "{}:{} ({})".format(*found) if found else "unknown"


def is_raised_within(error: Exception) -> bool:
    """Return whether jax or loopkit raises an error by itself, in no function of anyone else's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(WITHIN):
        trace = trace.tb_next
    return trace is None


def name_stack(eqn: Any | None = None) -> str:
    """Return the names around an equation; without one, around the code being traced."""
    return str(source_info.current_name_stack() if eqn is None else eqn.source_info.name_stack)
