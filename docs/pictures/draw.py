"""Draws the pictures of the page on checkpointing: python docs/pictures/draw.py"""

from dataclasses import replace
from pathlib import Path

import matplotlib

from loopkit import Plan
from loopkit._plans.plan import Step

matplotlib.use("agg")
matplotlib.rcParams["svg.hashsalt"] = "loopkit"
HERE = Path(__file__).parent
LOOP = Plan(1, bound=60, exact=True, step=Step(carry_bytes=400, residual_bytes=400))
PICTURES = {
    "four-checkpoints": replace(LOOP, slots=4),
    "four-and-five": replace(LOOP, slots=4, segment=5),
    "online": replace(LOOP, slots=8, exact=False),
}
for name, plan in PICTURES.items():
    plan.plot().savefig(HERE / f"{name}.svg", metadata={"Date": None})
