"""A trial as a small program that runs by itself."""

from __future__ import annotations

import inspect
import re

import numpy as np

from trials import transformations
from trials.compare import Trial
from trials.prelude import PRELUDE
from trials.transformations import LETTERS


def printed(trial: Trial) -> str:
    """Write a program that runs the trial through loopkit, and prints its results and the right
    ones."""
    program, pattern = trial.program, trial.pattern
    used = [LETTERS[letter] for letter in dict.fromkeys(pattern)]
    shown = [transformations.direction, transformations.vector, *used]
    x, others = trial.arguments()
    arrays = {k: f"jnp.array({np.asarray(v).tolist()}, '{v.dtype}')" for k, v in others.items()}
    lines = [
        HEADER,
        called_parts(program.body),
        program.body,
        "",
        *map(inspect.getsource, shown),
        f"def g(x, o):\n{arguments_of(trial)}",
        "",
        f"x = jnp.array({np.asarray(x).tolist()})",
        f"others = {{{', '.join(f'{k!r}: {v}' for k, v in arrays.items())}}}",
    ]
    lines += [f"g = {LETTERS[c].__name__}(g, {seed})" for seed, c in enumerate(pattern)]
    lines.append(CALLS[trial.outside])
    return "\n".join(lines)


def called_parts(body: str) -> str:
    """Return the definitions of the prelude that a program calls, and those that these call."""
    known = [(named(part), part) for part in re.split(r"\n\n\n", PRELUDE.strip()) if part]
    wanted, text = set(), body
    while True:
        more = {n for n, _ in known if re.search(rf"\b{n}\b", text)} - wanted
        if not more:
            return "\n\n\n".join(part for n, part in known if n in wanted) + "\n\n"
        wanted |= more
        text = "\n".join([body, *(part for n, part in known if n in wanted)])


def named(part: str) -> str:
    """Return the name of a definition; that of a rule is the name of its function."""
    found = re.match(r"@?(\w+)\.def", part) or re.search(
        r"^(?:class |def )?(\w+)\b(?!\.)(?= =|\(|:)", part, re.MULTILINE
    )
    assert found is not None, part
    return found[1]


def arguments_of(trial: Trial) -> str:
    """The lines that cut a vector into the program's arguments."""
    names, at = [], 0
    for t in trial.program.floats:
        size = int(np.prod(t.shape))
        leaf = f"x[{at}:{at + size}].reshape({t.shape})"
        at += size
        if t.kind == "complex":
            leaf = f"lax.complex({leaf}, x[{at}:{at + size}].reshape({t.shape}))"
            at += size
        names.append(f"{leaf}.astype('{t.dtype}')")
    names += ["o['n']", "o['m']", "o['flag']", "jax.random.key(o['key'])"]
    return f"    return vector(jax.tree.map(jnp.asarray, program({', '.join(names)})))"


HEADER = """\
import functools as ft
import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec

import loopkit
import loopkit as loops

jax.config.update("jax_enable_x64", True)
"""
CALLS = {
    "jit": "print(jax.jit(g)(x, others))",
    "donation": "print(jax.jit(g, donate_argnums=0)(x, others))",
    "export": "print(jax.export.export(jax.jit(g))(x, others).call(x, others))",
    "disable_jit": "with jax.disable_jit():\n    print(g(x, others))",
}
