"""100,000 tridiagonal systems in blocks, and every other way: examples/tridiagonal.py, timed.

Twice: with memory kept from call to call, and as the system gives it, which then takes most of the
time.
"""

from importlib.metadata import version

import harness  # puts the examples on the path
from findings import Record, spread
from report import Report

SECTIONS = (
    ("new", "Tridiagonal systems, memory new at every call", False),
    ("kept", "Tridiagonal systems, memory kept", True),
)
SYSTEMS, UNKNOWNS = 100_000, 100
LIBRARIES = "numba", "numpy", "scipy"


def compare(report: Report, repeats: int) -> None:
    try:
        import tridiagonal
        from tridiagonal import BESIDE, BEST, WRITTEN
    except ImportError as missing:
        report.note(f"{missing}: pip install '.[examples]'")
        return
    values, gradients = tridiagonal.contenders(tridiagonal.drawn(SYSTEMS, UNKNOWNS))
    seconds = tridiagonal.timed(values | gradients, repeats)
    report.about["libraries"] = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    report.measured(
        [
            Record(
                f"{SYSTEMS:,} systems of {UNKNOWNS}",
                name,
                seconds=spread(taken),
                ratio=harness.ratio(taken, seconds[BESIDE]),
                over=BESIDE,
            )
            for name, taken in seconds.items()
        ]
    )
    for what, name, over, limit in (
        ("tridiagonal systems in blocks, over numba on both cores", BEST, BESIDE, 1.2),
        ("the same over lax.scan as one writes it", BEST, WRITTEN, 0.35),
        ("its gradient, over the solution", "gradient, blocked", BEST, 3.0),
        ("its gradient, with the loss in blocks", "gradient, loss in blocks", BEST, 3.0),
    ):
        report.target(what, harness.ratio(seconds[name], seconds[over]), limit)
