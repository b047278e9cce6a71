"""Programs compiled for a GPU and a TPU on a machine that has neither."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

for name, value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a second process stops at a lock
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

TARGETS = "gpu", "tpu"
CARD = Path(__file__).with_name("h100_sxm.txtpb")


@lru_cache
def devices(target: str) -> list[Any]:
    """Two at least; the test is left out where there is no compiler for them."""
    try:
        if target == "tpu":
            return topologies.get_topology_desc("v5e:2x2", "tpu").devices
        how = {"target_config": CARD.read_text(), "topology": "1x2x1"}
        return topologies.get_topology_desc("", "cuda", **how).devices
    except Exception as error:  # whatever a plugin that is missing raises
        pytest.skip(f"no compiler for a {target}: {error}")


class Compiled(NamedTuple):
    text: str
    device_bytes: int
    """Temporary memory."""
    host_bytes: int


def figures(program: Any) -> Compiled:
    memory = program.memory_analysis()
    return Compiled(program.as_text(), memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)


def lowered(target: str, function: Any, *types: Any) -> Any:
    """For one device."""
    place = SingleDeviceSharding(devices(target)[0])
    return jax.jit(function, in_shardings=place, out_shardings=place).lower(*types)


def compiled(target: str, function: Any, *types: Any) -> Compiled:
    return figures(lowered(target, function, *types).compile())


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of an optimised program."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        begins = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begins:
            lines = found.setdefault(begins[1], [])
        lines.append(line)
    return found


def cycles(text: str, trips: int) -> int:
    """A TPU's estimate, each of its loops, none in another, taken to run so often."""
    total = 0
    bodies = set(re.findall(r" while\(.*body=%?([\w.\-]+)", text))
    for name, lines in computations(text).items():
        each = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', "\n".join(lines))))
        total += each * (trips if name in bodies else 1)
    return total
