"""Options of a loop: those that change no number, and those that do."""

from __future__ import annotations

import re

from trials.writer import Writer

KEEPS = (
    {},
    {"checkpoints": "'all'"},
    {"checkpoints": "1"},
    {"checkpoints": "2"},
    {"checkpoints": "3"},
    {"checkpoints": "loopkit.Plan(slots=2, segment=2)"},
    {"checkpoints": "loopkit.Plan(slots=1, segment=2)"},
    {"checkpoints": "loopkit.Plan(slots=4)"},
    {"checkpoints": "loopkit.Plan(slots=1, segment=3, store='residuals')"},
    {"checkpoints": "loopkit.Plan(slots=3, thinned=True)"},
    {"checkpoints": "loopkit.Plan(slots=8, segment=2, store='residuals')"},
    {"checkpoints": "loopkit.Plan(slots=0, keeps_all=True)"},
    {"checkpoints": "loopkit.Plan(slots=0, keeps_all=True, store='residuals', host=True)"},
    {"checkpoints": "loopkit.Plan(slots=3, host=True)"},
    {"checkpoints": "loopkit.Plan(slots=2, segment=2, store='residuals', host=True)"},
    {"checkpoints": "loopkit.Plan(slots=0, keeps_all=True, price=1.0)"},
    {"checkpoints": "loopkit.Plan(slots=0, keeps_all=True, price=1e9)"},
    {"checkpoints": "loopkit.Plan(slots=2, segment=2, store='residuals', price=0.5)"},
    {"checkpoints": "loopkit.Plan(slots=1, segment=3, store='residuals', price=1e9)"},
    {"checkpoints": "jax.checkpoint_policies.nothing_saveable"},
    {"checkpoints": "jax.checkpoint_policies.dots_saveable"},
    {"checkpoints": "jax.checkpoint_policies.dots_saveable", "memory": "20_000"},
    {"memory": "'100 kB'"},
    {"memory": "20_000"},
    {"memory": "{'device': '50 kB', 'host': '1 MB'}"},
)
"""Settings of what the backward pass keeps: none of them changes a number."""


MAYBE_INFINITE = frozenset({"odd types", "infinite slope beyond the last step"})
"""Constructs that make infinite numbers, or slopes, that do not count; so do bad branches."""


def kept(w: Writer, bound: bool, plan: bool = True) -> dict[str, str]:
    """`bound`: whether the steps have one; `plan`: whether a plan is of this very loop."""
    if "options" not in w.allowed:
        return {}
    how = w.d.choice(KEEPS)
    text = "".join(how.values())
    policy = "policies" in text and "memory" not in how
    if (("all" in text or policy) and not bound) or ("Plan" in text and not plan):
        return {}
    w.tags.update(["host"] if "host" in text else [])
    w.d.note(f"option: {'default' if not how else ' '.join(f'{k}={v}' for k, v in how.items())}")
    return dict(how)


def noted_together(w: Writer, call: str, how: dict[str, str], body: str) -> None:
    """Note pairs of options that show a mistake only if one loop has both."""
    text = w.text_of(body)
    rows = "store='residuals'" in how.get("checkpoints", "")
    if w.matrix is not None and w.matrix in text and rows:
        w.d.note("large product and rows of residuals")
    delayed = re.search(r" \+ [12]\) % [23]\]", text)
    bound = how.get("max_steps", "9" if re.search(r"fori_loop\(\S+, \d", call) else "0")
    if delayed and int(bound) > 2 and "segment=2)" in how.get("checkpoints", ""):
        w.d.note("a delay in segments")


def unrolled(w: Writer, whole: bool) -> dict[str, str]:
    """`whole`: whether all steps can be one iteration."""
    if not w.may("options", 40):
        return {}
    how = w.d.choice(("2", "3", "True", "0") if whole else ("2", "3"))
    w.d.note(f"option: unroll={how}")
    return {"unroll": how}


def narrowed(w: Writer) -> dict[str, str]:
    """Choose what happens to lanes that have stopped: it changes no number."""
    if not w.may("options", 60 if w.lanes else 30):
        return {}
    how = w.d.choice(("'compact'", "(1,)", "(2, 1)", "'wait'", "'flatten'"))
    w.d.note(f"option: lanes={how}{' inside a vmap' if w.lanes else ''}")
    return {"lanes": how}


def watched(w: Writer, lanes: str | None, checked: bool) -> dict[str, str]:
    """Choose what is shown of a loop, and looked for in it: it changes no number."""
    how = {}
    if w.may("watched", 20) and lanes != "'flatten'":  # which is in no step that one could show
        how["progress"] = "Quiet()"
    exact = w.dtypes == ("float64",) and not w.allowed & MAYBE_INFINITE
    exact = exact and "bad branch" not in w.tags
    kinds = ["bounds"] * checked + ["finite"] * (exact and w.may("watched", 70))
    if kinds:
        how["debug"] = repr(tuple(kinds) if kinds[1:] else kinds[0])
        w.d.note(f"option: debug={how['debug']}")
    w.d.counts.update(f"option: {name}" for name in how)
    w.tags.update(how)
    return how


def bounded(w: Writer, steps: int, throws: bool = False) -> dict[str, str]:
    """`max_steps` of a loop of at most so many: none, more, fewer."""
    if not w.may("max_steps", 60):
        return {}
    most = w.d.choice(("6", "4", "2", "1", "9", "0") if steps < 6 else ("20", "13", "7", "1"))
    w.d.note(f"max_steps={most}")
    enough = int(most) >= steps
    w.tags.update([] if enough else ["max_steps"])
    return {"max_steps": most} | (flag(w, "throw", 25, "throw") if enough and throws else {})


def flag(w: Writer, name: str, percent: int, tag: str = "") -> dict[str, str]:
    if not w.may("options", percent):
        return {}
    w.d.note(f"option: {name}")
    w.tags.update([tag] if tag else [])
    return {name: "True"}


def text_of(options: dict[str, str]) -> str:
    return "".join(f", {k}={v}" for k, v in options.items())
