"""Two processes, as on two machines: numbers, steps, and what happens when one of them dies."""

import re
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

for module in ("optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(module)

import multihost  # noqa: E402
import spread_programs  # noqa: E402
from language import model as language  # noqa: E402
from two_processes import LONGEST, pair, program  # noqa: E402

pytestmark = pytest.mark.slow

EXAMPLE = str(ROOT / "examples" / "multihost.py")
PROGRAMS = str(Path(spread_programs.__file__))
SMALL = ["--length", "64", "--width", "8", "--batch", "4"]
SMALL += ["--save-every", "2", "--heartbeat", "10", "--patience", "120"]
ENDLESS = str(10**6)


def run_both(tmp_path: Path, *command: str) -> list[str]:
    """Return what the two processes print, once both have ended well."""
    with pair(tmp_path, *command) as processes:
        statuses = [process.status() for process in processes]
        said = [process.said() for process in processes]
    assert statuses == [0, 0], "\n".join(said)
    return said


def found(tmp_path: Path, name: str) -> list[dict[str, np.ndarray]]:
    """Return what each of the two processes writes."""
    run_both(tmp_path, PROGRAMS, name, str(tmp_path))
    return [dict(np.load(tmp_path / f"{name}-{i}.npz")) for i in range(2)]


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12 * np.max(np.abs(wanted)))


def test_gradient(tmp_path):
    """Within a budget, of two processes, as by `jax.lax` in one; and added up once."""
    model = multihost.initial(spread_programs.WIDTH).model
    texts = multihost.excerpts(0, spread_programs.BATCH, spread_programs.LENGTH)
    loss, grad = jax.jit(jax.value_and_grad(language.bits_per_byte))(model, texts)
    for process in found(tmp_path, "gradient"):
        assert process["all-reduces"] == 1
        close(process["loss"], loss)
        for i, leaf in enumerate(jax.tree.leaves(grad)):
            close(process[f"leaf {i}"], leaf)


def written_out(a, steps: int, by: str):
    """`spread_programs.newton` in as many steps as are said."""
    x, total = a, 0.0
    for _ in range(steps):
        total = total + jnp.sum(jnp.sin(x))
        far = jnp.sum((x * x / a - 1) ** 2)
        x = x - (x - a / x) / 2 / (1 + 0.1 * far / (1 + far))
    return jnp.sum(jnp.sin(x)) + (0.0 if by == "while_loop" else total)


@pytest.mark.exhaustive
def test_predicates_of_what_all_have(tmp_path):
    """Both take the same number of steps, and have the value and gradient of a Python loop."""
    processes = found(tmp_path, "predicates")
    a = jnp.asarray(spread_programs.NUMBERS)
    for name, (by, _) in spread_programs.LOOPS.items():
        for how in spread_programs.HOW[name]:
            steps = {int(process[f"{name} {how} steps"]) for process in processes}
            assert len(steps) == 1
            (count,) = steps
            assert 5 < count < spread_programs.STEPS
            value, grad = jax.value_and_grad(written_out)(a, count, by)
            for process in processes:
                close(process[f"{name} {how}"], np.asarray([value, *grad]))


def test_each_takes_steps_of_its_own(tmp_path):
    """A step that does not look at other devices need not wait for them."""

    def last(x, n):
        for _ in range(n):
            x = jnp.sin(x) + x / 2
        return x

    pairs = zip(spread_programs.STARTS, spread_programs.COUNTS, strict=True)
    wanted = [jax.grad(last)(x, n) for x, n in pairs]
    for process in found(tmp_path, "own_steps"):
        close(process["gradient"], np.asarray(wanted))


def saved(folder: Path) -> list[int]:
    """The steps that are saved in full."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def wait_for_saved(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LONGEST
    while not any(s >= step for s in saved(folder)):
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.1)


def parameters(folder: Path, step: int) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, multihost.initial(8))
    with ocp.CheckpointManager(folder) as manager:
        restored = manager.restore(step, args=ocp.args.StandardRestore(like))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restored)]


@pytest.mark.parametrize("victim", [0, 1])
def test_one_dies(tmp_path, victim):
    """The other ends in an error, and both go on from what was saved, as if nothing had been."""
    folder = tmp_path / "checkpoints"
    command = [EXAMPLE, *SMALL, "--no-inspect", "--plot", str(tmp_path / "learnt.png")]
    command += ["--checkpoints"]
    with pair(tmp_path, *command, str(folder), "--steps", ENDLESS) as processes:
        wait_for_saved(folder, 4)
        processes[victim].running.kill()
        other = processes[1 - victim]
        assert other.status() != 0
        assert re.search("[Cc]onnection (closed|reset) by peer|another task died", other.said())

    steps = saved(folder)[-1] + 3
    for said in run_both(tmp_path, *command, str(folder), "--steps", str(steps)):
        assert f"begins at step {steps - 3}" in said
    whole = tmp_path / "uninterrupted"
    for said in run_both(tmp_path, *command, str(whole), "--steps", str(steps)):
        assert "begins at step 0" in said
    got, wanted = (parameters(path, steps) for path in (folder, whole))
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_is_stopped(tmp_path):
    """A process that is there and says nothing is taken for dead."""
    folder = tmp_path / "checkpoints"
    command = [EXAMPLE, *SMALL, "--no-inspect", "--checkpoints", str(folder), "--steps", ENDLESS]
    with pair(tmp_path, *command) as (first, second):
        wait_for_saved(folder, 2)
        second.running.send_signal(signal.SIGSTOP)
        assert first.status() != 0
        assert "stopped sending heartbeats" in first.said()


def test_one_does_not_come(tmp_path):
    """JAX waits for good for a process that sends heartbeats and does not go on."""
    with pair(tmp_path, PROGRAMS, "stuck", str(tmp_path)) as (first, _):
        assert first.status() == 1
        assert "the sum took more than 5 s: gave up" in first.said()


@pytest.mark.exhaustive
def test_example(tmp_path):
    """It starts its processes, says what it needs and whether it is right, and goes on."""
    options = [*SMALL, "--checkpoints", str(tmp_path / "checkpoints"), "--memory", "20 kB"]
    options += ["--plot", str(tmp_path / "learnt.png")]
    with program(tmp_path, EXAMPLE, *options, "--steps", "3") as first:
        assert first.status() == 0, first.said()
        said = first.said()
    gap, needed, stored = (
        float(re.search(pattern, said)[1])
        for pattern in (
            "differs by (.*) from",
            r"memory='20 kB' .* (\S+) MB",
            r"as by lax.scan .* (\S+) MB",
        )
    )
    assert gap < 1e-12
    assert needed < stored
    with program(tmp_path, EXAMPLE, *options, "--steps", "5") as second:
        assert second.status() == 0, second.said()
        assert "begins at step 3" in second.said()


def test_example_ends_in_the_error_of_a_process(tmp_path):
    """Three sequences are not divided over two processes."""
    options = [*SMALL, "--checkpoints", str(tmp_path / "checkpoints"), "--batch", "3"]
    with program(tmp_path, EXAMPLE, *options) as launcher:
        assert launcher.status() == 1, launcher.said()
        assert "Start all processes again" in launcher.said()
