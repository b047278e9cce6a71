"""Programs compiled for a TPU or an NVIDIA GPU on a machine that has neither.

    pip install '.[accelerators]'

brings both compilers, which need no driver. Nothing can be run, but what the compilers say is
exact: which loops know their trip count, what is copied, what a step launches, where the bytes are.
Import it before a device of JAX's is asked for.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

for name, value in {
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # with the next three, nobody is asked which TPU this is
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # by several processes at once
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}.items():
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)

import iterations  # noqa: E402
from loopkit._reports.in_place import CompiledModule  # noqa: E402

if not jax.config.jax_platforms:  # or the plugin of a GPU looks for one, and fails
    jax.config.update("jax_platforms", "cpu")

TARGETS = {"gpu": "H100", "tpu": "TPU v5e"}
_CARD = Path(__file__).with_name("h100_sxm.txtpb")


@lru_cache
def devices(target: str, count: int = 4) -> list[Any]:
    """Return devices of one machine, which need not exist."""
    if target == "tpu":
        return topologies.get_topology_desc(f"v5e:2x{count // 2}", "tpu").devices
    how = {"target_config": _CARD.read_text(), "topology": f"1x1x{count}"}
    return topologies.get_topology_desc("", "cuda", **how).devices


def why_not() -> str:
    """Why nothing can be compiled for them here; empty if everything can."""
    for target, name in TARGETS.items():
        try:
            devices(target)
        except Exception as error:  # whatever a plugin that is missing or broken raises
            return f"no compiler for {name} ({error}): pip install '.[accelerators]'"
    return ""


@dataclass(frozen=True)
class Compiled:
    """A program, and what the compiler made of it."""

    target: str
    text: str
    device_bytes: int
    """Temporary memory."""
    host_bytes: int
    seconds: float
    """To compile."""
    thunks: str
    """The tree of operations that a GPU executes; `thunks.py` reads it."""
    thunk_names: dict[int, str]
    """The instruction that each of its numbers is of."""
    module: Any
    """The module that JAX gave to the compiler, with its loops numbered."""
    numbers: int

    @cached_property
    def program(self) -> CompiledModule:
        return CompiledModule.parse(self.text)

    def counts(self, *arguments: Any) -> np.ndarray:
        """Count how often each numbered body and branch runs with these arguments."""
        return iterations.counts(self.module, self.numbers, jax.tree.leaves(arguments))


def planned_for(target: str) -> Any:
    """Return a context in which loops are planned for a target."""
    device = devices(target)[0]
    kind = AbstractDevice(device.device_kind, None, device.platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


def compiled(
    target: str, function: Callable[..., Any], *arguments: Any, shardings: Any = None
) -> Compiled:
    """`function` compiled for one device of a target, or as the shardings of its arguments say.

    Arguments are trees of arrays, or of `jax.ShapeDtypeStruct`s.
    """
    place = SingleDeviceSharding(devices(target)[0])
    how = {"in_shardings": place, "out_shardings": place}
    if shardings is not None:
        how = {"in_shardings": shardings}
    types = jax.tree.map(_type_of, arguments)
    with planned_for(target):
        lowered = jax.jit(function, keep_unused=True, **how).lower(*types)
    module = lowered.compiler_ir("stablehlo")
    numbers = iterations.number(module)
    with tempfile.TemporaryDirectory() as folder:
        # Only a GPU's compiler leaves something there that is not in the program's text.
        options = {"xla_dump_to": folder} if target == "gpu" else None
        begin = time.perf_counter()
        executable = lowered.compile(options)
        seconds = time.perf_counter() - begin
        thunks, names = _thunks(Path(folder))
    memory = executable.memory_analysis()
    return Compiled(
        target,
        executable.as_text(),
        memory.temp_size_in_bytes,
        memory.host_temp_size_in_bytes,
        seconds,
        thunks,
        names,
        module,
        numbers,
    )


def _type_of(value: Any) -> jax.ShapeDtypeStruct:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jax.ShapeDtypeStruct(np.shape(value), jnp.result_type(value))


def _thunks(folder: Path) -> tuple[str, dict[int, str]]:
    def written(ending: str) -> str:
        return next((path.read_text() for path in folder.glob(f"*.{ending}.txt")), "")

    # The first is written where the last passes have changed something.
    thunks = written("thunk_sequence_after_thunk_passes") or written("thunk_sequence")
    entry = r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)'
    pairs = re.findall(entry, written("thunk_metadata"))
    return thunks, {int(number): name for name, number in pairs}
