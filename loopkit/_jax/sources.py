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
"""The folder of this library; users' code is outside."""
INNER = tuple(
    os.path.join("jax", "_src", name)
    for name in ("lax", "source_info_util.py", "custom_derivatives.py", "api.py")
)
"""Files of JAX through which loops pass, or whose rules hold loops, beside `MACHINERY`."""
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
    "loopkit/_jax": ("devices", "jaxprs", "lax_loops", "primitives"),
    "loopkit/_foreign": ("replace",),
    "": ("contextlib",),
}
MACHINERY = tuple(
    os.path.join(*folder.split("/"), *f"{name}.py".split("/"))
    for folder, names in _BETWEEN.items()
    for name in names
)
"""Files between the call of a loop, by a user or a rule, and its primitive."""


def source_of(eqn: Any | None) -> tuple[str, int, str] | None:
    """Return the file, line and function outside jax and loopkit that made an equation.

    Without an equation, return those of the code being traced. For a loop inside a function of
    jax, return that function.
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
    """Return the caller of jax or loopkit, for tracebacks of jax that do not reach so far."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(WITHIN):
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def source() -> str:
    """Return `file:line (function)` of the code being traced, outside jax and loopkit."""
    found = source_of(None)
    return "{}:{} ({})".format(*found) if found else "unknown"


def is_raised_within(error: Exception) -> bool:
    """Return whether jax or loopkit itself raised an error, not a function of anyone else."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(WITHIN):
        trace = trace.tb_next
    return trace is None


def name_stack(eqn: Any | None = None) -> str:
    """Return the name stack of an equation; without one, that of the code being traced."""
    return str(source_info.current_name_stack() if eqn is None else eqn.source_info.name_stack)
