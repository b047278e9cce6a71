"""Does it see? Mistakes made on purpose, of the kinds that were real ones.

    python -m trials.mutants [--programs N] [--seed S] [NAME...]    # in tests/

Each is a small change to a copy of the package, which the trials then run with until one fails. That a mutant
survives says that the grammar cannot write what would show it, or seldom does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    """Text that is there once."""
    new: str


ENGINE = "_engine/"
FACTS, PASSES, RULES = f"{ENGINE}facts/", f"{ENGINE}passes/", f"{ENGINE}rules/"
SWEEPS, DERIVATIVE = f"{ENGINE}sweeps/", f"{ENGINE}derivative/"
STEP, LOG, SPLIT = f"{SWEEPS}step.py", f"{DERIVATIVE}write_log.py", f"{DERIVATIVE}split.py"
SLICES, VMAP, STEPS = "_buffers/slices.py", f"{RULES}vmap.py", f"{ENGINE}steps.py"

MUTANTS = [
    # what is known of a loop
    Mutant("activity not to its fixed point", f"{FACTS}activity.py", "flags, consts, xs = fixed_point(live, reaching)", "flags, consts, xs = reaching(list(live))"),
    Mutant("activity of the carry alone", f"{FACTS}activity.py", "tuple(x or y for x, y in zip(*pair, strict=True)) for pair", "tuple(x and y for x, y in zip(*pair, strict=True)) for pair"),
    Mutant("a counter one step ahead", f"{FACTS}counters.py", "v + jnp.asarray(step, v.dtype) *", "v + jnp.asarray(step + 1, v.dtype) *"),
    Mutant("a counter that goes down goes up", f"{FACTS}counters.py", "else -int(b.val)", "else int(b.val)"),
    Mutant("a flag of stopped lanes still set", f"{FACTS}counters.py", "jnp.broadcast_to(step < taken, v.shape)", "jnp.broadcast_to(step <= taken, v.shape)"),
    Mutant("a bound one step short", f"{FACTS}bounds.py", "// abs(self.by)))", "// abs(self.by)) - 1)"),
    Mutant("a limit itself not counted", f"{FACTS}bounds.py", 'UPWARDS = {"lt": 0, "le": 1}', 'UPWARDS = {"lt": 0, "le": 0}'),
    Mutant("a bound of one step of several", f"{FACTS}bounds.py", "None if by is None else by * length", "None if by is None else by * length * 3"),
    Mutant("rows written once, one too many", f"{FACTS}write_sites.py", "loop.length <= shape[axis]:", "loop.length <= shape[axis] + 3:"),
    # loops made of loops
    Mutant("an output's tangent along another axis", f"{PASSES}dual_loop.py", "*kept(loop.ys, active.ys))", "*(y._replace(axis=0) for y in kept(loop.ys, active.ys)))"),
    Mutant("an input's tangent along another axis", f"{PASSES}dual_loop.py", "*kept(loop.xs, active.xs))", "*(x._replace(axis=0) for x in kept(loop.xs, active.xs)))"),
    Mutant("lanes of a constant forgotten", f"{PASSES}batched_loop.py", "lanes + 1 if batched else 0", "lanes if batched else 0"),
    Mutant("outputs of lanes without their axis", f"{PASSES}batched_loop.py", "ys = [joins or a or b for", "ys = [a or b for"),
    Mutant("leaves that change places stay", f"{PASSES}still_leaves.py", "source[i] == c + i and", "source[i] is not None and c <= source[i] < c + n and"),
    Mutant("what the predicate reads is left out", f"{PASSES}prune.py", "carry = [a or b for a, b in zip(carry, asked", "carry = [a for a, _ in zip(carry, asked"),
    # a step's derivative
    Mutant("residuals of constants are not read", SPLIT, "reads = (*(a or b for a, b in zip(given, hoisting, strict=False)), *given[c:])", "reads = (*given[:c], *given[c:])"),
    Mutant("what was there before is never asked for", SPLIT, "if unread[i] and writes_once(loop, i)]", "if writes_once(loop, i) or True]"),
    Mutant("a log read from its first row", LOG, "read_rows(log, row_of(loop, first + k))", "read_rows(log, row_of(loop, first))"),
    Mutant("writes undone in the order they were made", LOG, "in reversed(list(zip(order, logs, strict=True))):", "in list(zip(order, logs, strict=True)):"),
    Mutant("what a write displaced is what it wrote", LOG, "old, ins[0] = read(ins[0], ins[2], site.window)", "old, ins[0] = ins[1], ins[0]"),
    Mutant("one product of several", f"{DERIVATIVE}deferred_products.py", "[_evaluate(t, place) for t in terms]) for", "[_evaluate(t, place) for t in terms[:1]]) for"),
    Mutant("products of a row too early", f"{DERIVATIVE}deferred_products.py", "rows[i] for v, i in self.rows.items()", "rows[i][::-1] for v, i in self.rows.items()"),
    # the sweeps
    Mutant("a stopped lane's carry is replayed on", STEP, "return hold(active, new, carry, self.safe.buffers), stored", "return new, stored"),
    Mutant("a stopped lane's cotangent moves", STEP, "d_carry = hold(running, d_carry, before[: len(d_carry)], buffers, axis)", "pass"),
    Mutant("a stopped lane gives cotangents", STEP, "flowing = hold(running, flowing, zeros, buffers, axis)", "pass"),
    Mutant("rows of a loop in reverse the other way", STEP, "at = row_of(loop, step)", "at = step"),
    Mutant("cotangents of inputs along the first axis", STEP, "x_axes = [axis + a for a in kept(loop.x_axes, how.active.xs)]", "x_axes = [axis for a in kept(loop.x_axes, how.active.xs)]"),
    Mutant("sums start with a segment", STEP, "return carry, write_rows(s[1], how.apart(carry)[0], k + 1)", "return carry, write_rows(s[1], how.apart(carry)[0], k)"),
    Mutant("the last segment always whole", f"{SWEEPS}every_segment.py", "stop = jnp.minimum((unit + 1) * length, loop.length)", "stop = (unit + 1) * length"),
    Mutant("the wrong slot has no memory", f"{SWEEPS}every_segment.py", "jnp.where(slot == 0, f, row)", "jnp.where(slot == 1, f, row)"),
    Mutant("a segment reversed beyond its end", f"{SWEEPS}strategy.py", "length if even else jnp.minimum(steps - first, length)", "length"),
    Mutant("lanes reversed as far as the first to stop", f"{SWEEPS}strategy.py", "taken.max(initial=0) if loop.lanes", "taken.min() if loop.lanes"),
    Mutant("rows of stopped lanes are written", f"{SWEEPS}every_residual.py", "y = select(active, y, [_jax.zeros(jax.typeof(v)) for v in y])", "pass"),
    Mutant("steps of lanes counted on", f"{SWEEPS}every_residual.py", "(active if go is None else active & go)", "1"),
    Mutant("steps of a segment numbered as segments", f"{SWEEPS}scheduled.py", "carry, unit * length, run * length)", "carry, unit, run * length)"),
    Mutant("a checkpoint after the one that is asked for", f"{SWEEPS}tables.py", "jnp.where(units <= target, units, -1)", "jnp.where(units <= target + 1, units, -1)"),
    Mutant("steps left over are taken", STEPS, "n if is_buffer else jnp.where(go, n, o)", "n"),
    Mutant("steps left over begin anew", STEPS, "lambda k, s: body(whole * unroll + k, s)", "lambda k, s: body(k, s)"),
    Mutant("stopped lanes write into buffers", "_buffers/buffer.py", "if self._owner is not None and self._owner.mask is not None:", "if False:"),
    # rules
    Mutant("no second derivative of the residuals", f"{RULES}pullback.py", "return out, list(map(_jax.add_tangents, flowing, second))", "return out, flowing"),
    Mutant("no second derivative of tangents", f"{RULES}pushforward.py", "if not any(_jax.nonzero(t_values[loop.cond_const_count :])):", "if True:"),
    Mutant("initial values that nobody asks for", f"{RULES}pushforward.py", "tuple(l and not a for l, a in zip(live.carry, wanted, strict=True))", "tuple(l for l, a in zip(live.carry, wanted, strict=True))"),
    Mutant("a lane's checkpoints in another's slots", VMAP, "            if apart:\n", "            if apart and False:\n"),
    Mutant("cotangents of rows that were not reached", f"{RULES}two_loops.py", "d_xs = [jnp.roll(v, -unused, 0) for v in d_xs]", "pass"),
    Mutant("rows of steps in the wrong place", f"{RULES}two_loops.py", "xs = [jnp.roll(v, unused, 0) for v in xs]", "pass"),
    # buffers
    Mutant("what is overwritten has a cotangent", SLICES, 'if of_buffer and not how["add"] and not how["fresh"]:', "if False:"),
    Mutant("what is not written has a cotangent", SLICES, "ct_value = jnp.where(masks[0], ct_value, jnp.zeros_like(ct_value))", "pass"),
    Mutant("the first of equal rows is kept", "_buffers/indexing.py", "np.ones((flat.size, flat.size), bool), 1)", "np.ones((flat.size, flat.size), bool), 1).T"),
    Mutant("rows from the end, one off", "_buffers/window.py", "jnp.where(starts < 0, starts + room, starts)", "jnp.where(starts < 0, starts + last, starts)"),
    Mutant("slices out of bounds have cotangents", "_jaxprs/slice_cotangents.py", 'label = "drop" if mode ==', 'label = "clip" if mode =='),
    Mutant("a list as long as its last write", "_buffers/tensor_array.py", "size = jnp.maximum(jnp.asarray(self._size, jnp.int32), jnp.asarray(at + 1, jnp.int32))", "size = jnp.asarray(at + 1, jnp.int32)"),
    # what users ask for
    Mutant("the gradient is not truncated", "_loops/truncate.py", "still = lax.stop_gradient(value)", "still = value"),
    Mutant("blocks of a loop in reverse from the start", "_tracing/axes.py", "first, after = (left, 0) if reverse else (0, whole)", "first, after = 0, whole"),
    Mutant("all steps counted as enough", "_loops/fori_loop.py", "stopped=jnp.array(length == trips)", "stopped=jnp.array(True)"),
    # one program taken for another
    Mutant("numbers left out of keys", "_programs/key.py", "return typed(v.aval), self.of(v.val) if known else _content(np.asarray(v.val))", "return typed(v.aval)"),
    Mutant("a field left out of keys", "_programs/key.py", "for f in dataclasses.fields(value) if f.compare)", 'for f in dataclasses.fields(value) if f.compare and f.name != "reverse")'),
    Mutant("constants left out of keys", "_programs/key.py", "consts = tuple(map(self.of, getattr(jaxpr, \"consts\", ())))", "consts = ()"),
]  # fmt: skip


def applied(mutant: Mutant, package: Path) -> None:
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places"
    path.write_text(text.replace(mutant.old, mutant.new))


def killed(mutant: Mutant, programs: int, seed: int) -> str:
    """What the first trial said that failed; nothing if none did."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "loopkit"
        shutil.copytree(TESTS.parent / "loopkit", package)
        applied(mutant, package)
        paths = os.pathsep.join([folder, str(TESTS)])
        command = [sys.executable, "-m", "trials.hunt", str(programs), str(seed)]
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode == 0:
        return ""
    return (done.stdout.strip() or done.stderr.strip() or "crashed").splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", default=400, type=int)
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.names or any(n in m.name for n in given.names)]
    found = 0
    for mutant in chosen:
        began = time.monotonic()
        said = killed(mutant, given.programs, given.seed)
        found += bool(said)
        what = "killed" if said else "SURVIVED"
        print(f"{what}: {mutant.name} ({time.monotonic() - began:.0f} s) {said[:150]}", flush=True)
    print(f"{found} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
