"""Measure how long `import loopkit` takes after JAX: 0.15 s at most, by `python -X importtime`.

python import_time.py [RUNS]
"""

import re
import subprocess
import sys

MOST = 0.15
"""Seconds, in the best of several runs."""
JAX = 0.5
"""Seconds that JAX takes where nothing else runs. Where it takes longer, so may loopkit."""
PROGRAM = "import jax\nimport gc\ngc.freeze()\nimport loopkit"
"""The garbage collector leaves the objects of JAX alone. A search of them takes 0.04 s, and falls
on loopkit or on something else, by chance."""
LINE = re.compile(r"import time:\s+\d+ \|\s+(\d+) \| (\S+)", re.MULTILINE)
"""One of what is imported at the top: a name without spaces before it."""


def seconds() -> tuple[float, float]:
    """Return the seconds that jax takes to import, and loopkit after it."""
    command = [sys.executable, "-X", "importtime", "-c", PROGRAM]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    taken = {name: int(microseconds) / 1e6 for microseconds, name in LINE.findall(told)}
    return taken["jax"], taken["loopkit"]


seconds()  # writes bytecode
runs = int((sys.argv[1:] or ["9"])[0])
# The speed of a machine changes from run to run, so each run has a limit of its own.
found = [
    (loopkit, MOST * max(1, jax / JAX), jax) for jax, loopkit in (seconds() for _ in range(runs))
]
loopkit, most, jax = min(found, key=lambda run: run[0] / run[1])
print(f"import jax: {jax:.3f} s; import loopkit after it: {loopkit:.3f} s, at most {most:.3f} s")
sys.exit(loopkit > most)
