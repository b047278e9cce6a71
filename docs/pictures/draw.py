"""Draws the pictures of how it works and of checkpointing.

    python docs/pictures/draw.py

Each is drawn twice, for light pages and for dark ones.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import loopkit
from loopkit import Plan
from loopkit._plans.plan import StepCosts
from loopkit.schedules import reversal
from loopkit.schedules.reversal import Advance, Discard, Restore, Reverse, Save
from style import BLUE, GREY, HERE, ORANGE, RED, save

LOOP = Plan(1, bound=60, exact=True, step=StepCosts(carry_bytes=400, residual_bytes=400))
PLANS = {
    "four-checkpoints": replace(LOOP, slots=4),
    "four-and-five": replace(LOOP, slots=4, segment=5),
    "online": replace(LOOP, slots=8, exact=False),
}


def at_work(ink: str, units: int = 12, slots: int = 3) -> Any:
    """Return a schedule, a row for each time that it goes back to what it has kept."""
    figure, ax = plt.subplots(figsize=(9, 5), layout="constrained")
    row, held, swept = 0, {}, False

    def arrow(colour: str, start: float, stop: float) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (stop, row), (start, row), arrowprops=style)

    def kept(slot: int) -> None:
        unit, since = held.pop(slot)
        ax.plot([unit, unit], [since, row], color=GREY, linewidth=5, alpha=0.45, zorder=0)

    for action in reversal.gradient(units, slots):
        match action:
            case Save(unit, slot):
                held[slot] = unit, row
                ax.plot(unit, row, "o", color=ink, markersize=7)
            case Advance(start, stop):
                arrow(ORANGE if swept else BLUE, start, stop)
            case Restore(unit, _):
                swept, row = True, row + 1
                ax.plot(unit, row, "o", color=ink, markersize=7, markerfacecolor="none")
            case Reverse(unit):
                arrow(RED, unit + 1, unit)
            case Discard(slot):
                kept(slot)
    for colour, label in ((BLUE, "run"), (ORANGE, "run again"), (RED, "reversed")):
        ax.plot([], [], color=colour, label=label, linewidth=2)
    ax.plot([], [], "o", color=ink, label="kept")
    ax.plot([], [], "o", color=ink, markerfacecolor="none", label="taken up again")
    ax.plot([], [], color=GREY, alpha=0.45, linewidth=5, label="a slot in use")
    ax.set(xlabel="step", ylabel="later", xticks=range(units + 1), yticks=[])
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right")
    return figure


def moments(units: int = 12, slots: int = 3) -> dict[str, Any]:
    """Return the schedule of `at_work`, for the slider below it (docs/javascripts/schedule.js)."""
    told: list[dict[str, Any]] = []
    held: dict[int, int] = {}
    swept, left = False, units

    def moment(does: str, at: range, says: str) -> None:
        kept = sorted(held.values())
        told.append({"does": does, "at": list(at), "kept": kept, "reversed": left, "says": says})

    for action in reversal.gradient(units, slots):
        match action:
            case Save(unit, slot):
                held[slot] = unit
                moment("", range(0), f"the state before step {unit} is kept")
            case Advance(start, stop):
                steps = f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"
                run = "run again, to make a state" if swept else "run"
                moment("again" if swept else "run", range(start, stop), f"{steps} {run}")
            case Restore(unit, _):
                swept = True
                moment("", range(0), f"the state before step {unit} is taken up again")
            case Reverse(unit):
                left = unit
                moment("back", range(unit, unit + 1), f"step {unit} is reversed")
            case Discard(slot):
                unit = held.pop(slot)
                moment("", range(0), f"the state before step {unit} is given up")
    return {"units": units, "moments": told}


def schedule(plan: Plan, ink: str) -> Any:
    """Draw a plan with `Plan.plot`, in ink that is visible."""
    figure = plan.plot()
    above, below = figure.axes
    for line in (*above.lines, *below.lines):
        if line.get_color() in ("black", "k"):
            line.set_color(ink)
    for filled in below.collections:
        filled.set(facecolor=GREY, edgecolor=GREY, alpha=0.4)
    above.legend(frameon=False)
    return figure


def frontier(ink: str) -> Any:
    """Draw what may be stored of a layer of attention, by `Explanation.plot`."""
    sizes = {"query": (64, 64), "value": (64, 64), "up": (64, 256), "down": (256, 64)}
    layers = {name: jnp.ones((24, *size)) for name, size in sizes.items()}

    def layer(h: Any, w: Any) -> tuple[Any, None]:
        scores = jax.nn.softmax(h @ w["query"] @ h.T, axis=-1)
        h = h + scores @ h @ w["value"]
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

    within = lambda h: loopkit.scan(layer, h, layers, memory="4 MB")[0]
    figure = loopkit.explain(within, jnp.ones((128, 64))).plot()[1]
    line, taken, *policies = figure.axes[0].lines
    line.set_color(BLUE)
    taken.set_color(RED)
    for policy, colour in zip(policies, (ink, ORANGE, GREY), strict=True):
        policy.set(color=colour, markersize=9, markeredgewidth=2)
    figure.axes[0].legend(frameon=False)
    return figure


def pictures(ink: str) -> Iterator[tuple[str, Any, dict]]:
    yield "at-work", at_work(ink), {}
    for name, plan in PLANS.items():
        yield name, schedule(plan, ink), {}
    yield "frontier", frontier(ink), {}


def main() -> None:
    HERE.joinpath("at-work.json").write_text(json.dumps(moments()) + "\n")
    save(pictures)


if __name__ == "__main__":
    main()
