"""Draw a plan: which step runs when, and how many bytes are stored at that time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from loopkit._arguments import errors
from loopkit.schedules import online, reversal
from loopkit.schedules.reversal import Action, Advance, Discard, Restore, Reverse, Save

Plan = Any
"""The type of `loopkit.Plan`, whose file imports this one."""

LINE_STYLES = {
    "forward": ("-", "tab:blue"),
    "recomputed": ("-", "tab:orange"),
    "replayed": (":", "tab:orange"),
    "reversed": ("-", "tab:red"),
}
"""The line style and colour of each kind of stretch."""


class Stretch(NamedTuple):
    """Steps that run, or are reversed, one after another."""

    kind: str
    time: int
    """The number of steps run and reversed before these."""
    start: int
    stop: int


class Picture(NamedTuple):
    """The content of a drawing, in steps and bytes."""

    stretches: list[Stretch]
    saves: list[tuple[int, int]]
    """The (time, step) of every checkpoint."""
    in_use: list[tuple[int, int]]
    """The (time, bytes) of every change; the bytes hold from that time on."""


def picture(plan: Plan, steps: int) -> Picture:
    """Return what to draw for a loop of `steps` steps."""
    if plan.strategy in ("every residual", "every carry"):
        return _every_step(plan, steps)
    segments = -(-steps // plan.segment)
    again = plan.rerun // plan.segment if plan.keeps_last else segments
    actions: Iterable[Action]
    if plan.keeps_last:
        actions = _keeping_last(segments, again)
    elif plan.strategy == "every segment" or plan.exact:
        actions = reversal.gradient(segments, plan.slots)
    else:
        actions = reversal.online_gradient(online.cheapest(plan.slots, segments), segments)
    drawn = Picture([], [], [(0, 0)])
    time, held, swept, kept = 0, set(), False, 0

    def run(kind: str, start: int, stop: int) -> None:
        nonlocal time
        drawn.stretches.append(Stretch(kind, time, start, stop))
        time += abs(stop - start)

    def use(rows: int = 0) -> None:
        last = kept * plan.segment * plan.row.bytes
        drawn.in_use.append((time, len(held) * plan.step.carry_bytes + rows + last))

    for action in actions:
        match action:
            case Advance(start, stop):
                kind = "recomputed" if swept else "forward"
                run(kind, start * plan.segment, min(stop * plan.segment, steps))
                kept = max(0, stop - again)
            case Save(segment, slot):
                if segment or not plan.spared:  # the initial carry needs no memory
                    held.add(slot)
                drawn.saves.append((time, segment * plan.segment))
                use()
            case Restore():
                swept = True
            case Discard(slot):
                held.discard(slot)
                use()
            case Reverse(segment):
                first, last = segment * plan.segment, min((segment + 1) * plan.segment, steps)
                use(plan.row_bytes if segment < again else 0)
                if plan.segment > 1 and segment < again:
                    run("replayed", first, last)
                run("reversed", last, first)
                kept = min(kept, max(0, segment - again))
                use()
    return drawn


def _keeping_last(segments: int, again: int) -> Iterator[Action]:
    """Yield the actions if the first segments run again, and the others run once."""
    for segment in range(again):
        yield Save(segment, segment)
        yield Advance(segment, segment + 1)
    yield Advance(again, segments)
    yield from (Reverse(segment) for segment in reversed(range(again, segments)))
    for segment in reversed(range(again)):
        yield Restore(segment, segment)
        yield Reverse(segment)
        yield Discard(segment)


def _every_step(plan: Plan, steps: int) -> Picture:
    carries = plan.strategy == "every carry"
    row = plan.row.bytes
    stretches = [Stretch("forward", 0, 0, steps), Stretch("reversed", steps, steps, 0)]
    saves = [(t, t) for t in range(steps)] if carries else []
    return Picture(stretches, saves, [(0, 0), (1, row), (steps, steps * row), (2 * steps, 0)])


def draw(plan: Plan, steps: int, ax: Any) -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "loopkit.Plan.plot: the package matplotlib must be installed. Run `pip install "
            "loopkit[plot]`. Got: an environment without it."
        ) from error
    if ax is None:
        _, ax = plt.subplots(
            2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
        )
    try:
        above, below = ax
    except (TypeError, ValueError):
        advice = "Pass two axes of matplotlib, or leave `ax` out."
        raise errors.wrong_type(
            "Plan.plot", "ax", "must be a pair of axes", repr(ax), advice
        ) from None
    drawn = picture(plan, steps)
    seen: set[str] = set()
    for kind, time, start, stop in drawn.stretches:
        style, colour = LINE_STYLES[kind]
        label = None if kind in seen else kind
        seen.add(kind)
        end = time + abs(stop - start)
        above.plot([time, end], [start, stop], style, color=colour, lw=1.5, label=label)
    if drawn.saves:
        above.plot(*zip(*drawn.saves, strict=True), "k.", ms=4, label="carry saved")
    above.set(ylabel="step")
    above.legend(fontsize="small", loc="upper right")
    times, sizes = zip(*drawn.in_use, strict=True)
    below.step(times, sizes, where="post", color="0.3")
    below.fill_between(times, sizes, step="post", color="0.85")
    below.set(xlabel="steps run and reversed", ylabel="bytes stored", ylim=(0, None))
    return above.figure
