"""Layers of a network: rows of features go through weights that are stacked in one array."""

from __future__ import annotations

from trials import options
from trials.steps import most_trips, statements, trips, within
from trials.values import value
from trials.writer import Writer

CALLS = {
    "{}(": "no budget",
    "loopkit.checkpointed({})(": "replaced",
    "loopkit.checkpointed({}, memory='50 kB')(": "budget",
    "loopkit.checkpointed({}, memory='50 kB', measure=True)(": "measured budget",
}


def layers(w: Writer) -> None:
    """Each layer adds to the rows. A scan runs them, or a loop of Python's, which is no loop."""
    before, w.variables = w.variables, [v for v in w.variables if not v.buffer]
    rows = w.some_float(((3,), (2, 3)))
    count = trips(w, most_trips(w))
    start = value(w, rows)
    weights = w.let(f"rows({count}, {value(w, rows.of((3, 3)))})", rows.of((count, 3, 3))).name
    layer, h, x = w.name("layer"), w.name("h"), w.name("x")
    with within(w, count), w.function(f"{layer}({h}, {x})"):
        w.add(h, rows)
        w.add(x, rows.of((3, 3)))
        statements(w, 2)
        hidden = f"jnp.tanh(to_many({value(w, rows)} @ {x} / 3)) @ MANY.T / 36"
        w.line(f"return {h} + ({hidden}).astype('{rows.dtype}')")
    network, in_python = w.name("network"), w.d.chance(50)
    with w.function(f"{network}({h}, {x})"):
        if in_python:
            w.line(f"for k in range({count}):")
            w.line(f"    {h} = {layer}({h}, {x}[k])")
            w.line(f"return {h}")
        else:
            how = options.text_of(options.kept(w, True) | options.unrolled(w, True))
            step = f"lambda h, x: ({layer}(h, x), None)"
            w.line(f"return loops.scan({step}, {h}, {x}, {count}{how})[0]")
    call = w.d.choice(list(CALLS)) if w.d.chance(60) else "{}("
    w.tags.update(["layers", "checkpointed"] if "loopkit" in call else ["layers"])
    w.tags.update(["measured"] if "measure" in call else [])
    w.d.note(f"layers in {'Python' if in_python else 'a scan'}: {CALLS[call]}")
    w.variables = [*before, *(v for v in w.variables if v not in before)]
    w.let(f"{call.format(network)}{start}, {weights})", rows, moving=True)
