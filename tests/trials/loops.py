"""Loops, and steps: carries of random trees, inputs, outputs, and what a step does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from trials import options
from trials.buffers import empty_list, new_buffer, store
from trials.draws import BOOL, FLOAT, INT, INTEGERS, KEY, Type
from trials.expressions import expression
from trials.trees import Tree, draw_tree
from trials.values import integer, predicate, scalar, value
from trials.writer import Variable, Writer

DEEPEST = 3
MOST_TRIPS = 12
"""Of the innermost step."""


@dataclass
class Carry:
    """What goes from step to step: variables before the loop, and where each stands in its tree."""

    initial: list[Variable]
    tree: Tree
    counter: int | None = None
    """Which leaf counts, if one does."""

    @property
    def init(self) -> str:
        return self.tree.text([v.name for v in self.initial])

    def named(self) -> dict[str, str]:
        """The argument that says which leaves are buffers; not of those of a loop around."""
        paths = self.tree.paths("c")
        own = [p for p, v in zip(paths, self.initial, strict=True) if v.buffer == "new buffer"]
        return {"buffers": f"lambda c: [{', '.join(own)}]"} if own else {}


def leaf_type(w: Writer) -> Type:
    """Of a value that a loop carries, reads or returns."""
    way = w.d.weighted({"float": 12, "int": 2, "other": 4})
    if way == "int":
        return replace(INT, dtype=w.d.choice(INTEGERS))
    if way == "float" or "odd types" not in w.allowed:
        return w.some_float()
    return w.d.choice((BOOL, KEY, FLOAT.of((0,)), FLOAT.of((0, 3)), Type("complex128"), Type("complex128", (3,)), Type("complex64", (), True)))  # fmt: skip


def draw_carry(w: Writer, counter: str | None = None) -> Carry:
    """`counter`: how one of the leaves begins."""
    initial = [w.let(value(w, t), t) for t in (leaf_type(w) for _ in range(w.d.number(1, 3)))]
    if w.may("buffer", 50):
        initial.append(new_buffer(w))
    if w.may("list", 25):
        initial.append(empty_list(w))
    outer = [v for v in w.buffers() if v not in initial]
    if outer and w.d.chance(50):
        w.d.note("buffer of a loop around")
        initial.append(w.pick(outer))
    at = None
    if counter is not None:
        at = w.d.number(0, len(initial))
        kind = FLOAT if "." in counter else INT
        initial.insert(at, Variable(counter, kind))
    return Carry(initial, draw_tree(w.d, len(initial)), at)


def unpacked(w: Writer, carry: Carry, base: str) -> list[Variable]:
    """Its leaves, by name, in the function at hand."""
    found = []
    for path, v in zip(carry.tree.paths(base), carry.initial, strict=True):
        mark = v.buffer.removeprefix("new ") if v.buffer else ""
        found.append(w.let(path, v.type, mark, "b" if mark else "v"))
    return found


def statements(w: Writer, most: int) -> None:
    """Some lines of a step; not all of what they compute is used."""
    for _ in range(most):
        if not w.d.chance(75):
            return
        if w.depth < DEEPEST and w.trips * 2 <= MOST_TRIPS and w.may("nests", 25):
            loop(w)
        elif w.buffers() and w.d.chance(60):
            store(w)
        else:
            kind = leaf_type(w) if w.d.chance(25) else w.some_float()
            w.let(expression(w, kind), kind)


def next_leaf(w: Writer, old: Variable, now: list[Variable]) -> str:
    """What a leaf of the carry becomes."""
    if old.buffer:
        latest = [v for v in w.buffers() if v.name == old.name or v.origin == old.name]
        return latest[0].name
    way = w.d.weighted({"new": 8, "sum": 3, "kept": 2, "swapped": 1})
    if way == "kept":
        w.d.note("leaf that never changes")
        return old.name
    if way == "sum" and old.type.inexact:
        return f"{old.name} + {value(w, old.type)} * 0.3"
    if way == "swapped":
        same = [v for v in now if v.type.fits(old.type) and v is not old and not v.buffer]
        if same:
            w.d.note("leaves that change places")
            return w.d.choice(same).name
    return expression(w, old.type)


def step(w: Writer, carry: Carry, base: str, count: Callable[[str], str] | None = None) -> str:
    """The lines of a step; the tree that the carry becomes."""
    now = unpacked(w, carry, base)
    if carry.counter is not None:
        before_end(w, now[carry.counter])
    statements(w, 4)
    after = [next_leaf(w, v, now) for v in now]
    if carry.counter is not None and count is not None:
        after[carry.counter] = count(now[carry.counter].name)
    return carry.tree.text(after)


def before_end(w: Writer, counter: Variable, limit: str | None = None) -> None:
    """How far it is to the end, where that is known to be no less than 0 while the loop runs."""
    limit = limit or w.limit
    if limit is not None and "infinite slope beyond the last step" in w.allowed:
        w.let(f"jnp.asarray({limit} - {counter.name}, 'float64')", FLOAT, prefix="left")


def draw_limit(w: Writer, most: int) -> str:
    """A number of steps, known or not, from 0."""
    way = w.d.weighted({"known": 4, "argument": 6, "data": 2, "integer": 2})
    w.d.note(f"number of steps: {way}")
    if w.lanes and way in ("argument", "integer"):
        w.d.note("lanes that stop apart inside")
        last = [v.name for v in w.having(lambda v: v.name.startswith("k"))]
        return f"{last[0]} % {most + 1}"
    if way == "argument":
        return f"{w.d.choice(('n', 'm'))} % {most + 1}" if most < 4 else w.d.choice(("n", "m"))
    if way == "data":
        return f"whole({scalar(w)}, {most})"
    if way == "integer":
        return f"jnp.asarray({integer(w)}, 'int32') % {most + 1}"
    return str(w.d.number(0, most))


def within(w: Writer, most: int) -> ExitStack:
    """Where a step is written: one loop deeper."""
    stack = ExitStack()
    before = w.depth, w.trips, w.limit
    w.depth, w.trips = w.depth + 1, w.trips * max(1, most)
    w.d.note(f"loops {w.depth} deep")

    def leave() -> None:
        w.depth, w.trips, w.limit = before

    stack.callback(leave)
    return stack


def most_trips(w: Writer) -> int:
    return max(1, min(4, MOST_TRIPS // w.trips, 4 if w.depth == 0 else 3))


def loop(w: Writer) -> None:
    kinds = {"scan": 5, "while": 4, "fori": 3, "lax": 1}
    kinds |= {"in lanes": 2} if not w.lanes and w.may("lanes", 60) else {}
    kind = w.d.weighted(kinds)
    w.d.note(f"loop: {kind}")
    LOOPS[kind](w)


def in_lanes(w: Writer) -> None:
    """A function with a loop, for three values at once, each of which may stop when it likes."""
    before, allowed = w.variables, w.allowed
    w.variables = [v for v in before if not v.buffer]  # of a step around, not of one lane
    lane, x, k = w.name("lane"), w.name("x"), w.name("k")
    row = w.some_float(((), (3,)))
    given = w.d.choice(("jnp.arange(3, dtype='int32')", "jnp.array([2, 0, 3], 'int32')"))
    at, w.lanes, w.trips = value(w, row.of((3, *row.shape))), True, w.trips * 3
    with w.function(f"{lane}({x}, {k})"):
        w.add(x, row)
        w.add(k, INT)
        loop(w)
        result = replace(row, rough=row.rough or len(w.dtypes) > 1)
        w.line(f"return {expression(w, result)}")
    w.lanes, w.trips, w.allowed = False, w.trips // 3, allowed
    w.variables = before
    w.let(f"jax.vmap({lane})({at}, {given})", result.of((3, *row.shape)))


def while_loop(w: Writer) -> None:
    most = most_trips(w)
    by_floats = w.d.chance(15)
    limit = draw_limit(w, most)
    if not limit.isdigit():
        limit = w.let(limit, INT, prefix="n").name
    carry = draw_carry(w, "0.0" if by_floats else "0")
    body, goes_on = w.name("body"), w.name("goes_on")
    with w.function(f"{goes_on}(c)"):
        now = unpacked(w, carry, "c")
        i = now[carry.counter].name
        form = w.d.choice(("{i} < {n}", "~({i} >= {n})", "{n} > {i}", "{i} <= {n} - 1", "jnp.logical_and({i} < {n}, {p})", "({i} < {n}) & ~{q}"))
        p, q = predicate(w), f"({scalar(w)} > 2.5)"
        w.line(f"return {form.format(i=i, n=limit, p=p, q=q)}")
    with within(w, most), w.function(f"{body}(c)"):
        w.limit = limit
        add = "1.0" if by_floats else "1"
        count = f"{{}} + {add}"
        if w.d.chance(10):
            w.d.note("a counter that an inner loop moves")
            count = "loops.fori_loop(0, 2, lambda _, i: i + 1, {})"
        w.line(f"return {step(w, carry, 'c', count.format)}")
    bound = options.bounded(w)
    how = bound | options.kept(w, bool(bound)) | options.unrolled(w, False) | carry.named()
    if not bound:
        w.tags.add("no bound")
    w.tags.add("while")
    finished(w, carry, f"loops.while_loop({goes_on}, {body}, {carry.init}@)", how)


def fori_loop(w: Writer) -> None:
    most = most_trips(w)
    lower, upper = w.d.choice(("0", "1", "-1")), draw_limit(w, most)
    known = upper.isdigit()
    carry = draw_carry(w)
    if not known:
        w.tags.add("while")
        upper = w.let(upper, INT, prefix="n").name
    body, i = w.name("body"), w.name("i")
    with within(w, most + (lower == "-1")), w.function(f"{body}({i}, c)"):
        counter = w.add(i, INT)
        before_end(w, counter, upper)
        w.line(f"return {step(w, carry, 'c')}")
    bound = options.bounded(w)
    if not (bound or known):
        w.tags.add("no bound")
    how = bound | options.kept(w, known or bool(bound)) | options.unrolled(w, known)
    finished(w, carry, f"loops.fori_loop({lower}, {upper}, {body}, {carry.init}@)", how | carry.named())


def finished(w: Writer, carry: Carry, call: str, how: dict[str, str]) -> None:
    """The call, and what it returns by name."""
    how |= options.flag(w, "return_info", 20, "return_info")
    out = w.name("out")
    w.line(f"{out} = {call.replace('@', options.text_of(how))}")
    if "return_info" in how:
        told(w, f"{out}[1]")
        w.line(f"{out} = {out}[0]")
    ended(w, carry, out)
    if w.may("again", 30):
        w.d.note("the same steps again")
        other = dict(how) | ({"max_steps": "1"} if "max_steps" in how else {})
        finished(w, carry, call, other)


def told(w: Writer, info: str) -> None:
    w.let(f"{info}.steps", INT)
    w.let(f"{info}.stopped", BOOL)


def ended(w: Writer, carry: Carry, out: str) -> None:
    """The carry after a loop: what was a buffer is an array, but in a loop that carries it too."""
    for path, v in zip(carry.tree.paths(out), carry.initial, strict=True):
        if v.buffer in ("buffer", "list"):  # of the loop around
            found = w.let(path, v.type, v.buffer, "b")
            w.variables[-1] = replace(found, origin=v.origin or v.name)
        elif v.buffer == "new list":
            w.let(f"{path}.stack()", v.type)
            w.let(f"{path}.size", INT)
        else:
            w.let(path, v.type)


def lax_scan(w: Writer) -> None:
    """One of lax, which nobody is asked to replace."""
    allowed, w.allowed = w.allowed, w.allowed - {"buffer", "list"}
    before, w.variables = w.variables, [v for v in w.variables if not v.buffer]
    most = w.d.number(0, most_trips(w))
    carry = draw_carry(w)
    body = w.name("body")
    with within(w, most), w.function(f"{body}(c, _)"):
        w.line(f"return {step(w, carry, 'c')}, None")
    w.allowed = allowed
    w.variables = [*before, *(v for v in w.variables if v not in before)]
    out = w.name("out")
    w.line(f"{out}, _ = lax.scan({body}, {carry.init}, None, {most})")
    ended(w, carry, out)


def scan(w: Writer) -> None:
    most = w.d.number(0, most_trips(w))
    carry = draw_carry(w)
    xs, axes = inputs(w, most)
    body, y_tree, ys = w.name("body"), Tree(), []
    with within(w, most), w.function(f"{body}(c, x)"):
        for (_, t, tree_path), axis in zip(xs[1], axes, strict=True):
            w.let(tree_path, t if axis is not None else t.of(with_rows(t, most, 0)))
        new = step(w, carry, "c")
        ys = [leaf_type(w) for _ in range(w.d.number(0, 2))]
        if w.allowed & {"until", "axes"}:  # of keys there are no zeros
            ys = [t if t.kind != "key" else FLOAT for t in ys]
        values = [w.let(expression(w, t), t).name for t in ys]
        y_tree = draw_tree(w.d, len(ys)) if ys else Tree()
        w.line(f"return {new}, {y_tree.text(values) if ys else None}")
    how = scan_options(w, carry, most, axes, xs)
    out_axes = stacked_along(w, ys, how)
    how |= {} if out_axes is None else {"out_axes": y_tree.text([str(a) for a in out_axes])}
    how |= options.flag(w, "return_info", 20, "return_info")
    call = f"loops.scan({body}, {carry.init}, {xs[0]}, {most}@)"
    stacks = [(t, axis) for t, axis in zip(ys, out_axes or [0] * len(ys), strict=True)]
    scanned(w, carry, call, how, (y_tree, stacks, most))
    if w.may("again", 30):
        w.d.note("the same steps again")
        other = how | {"reverse": str("reverse" not in how)} | options.unrolled(w, True)
        w.tags.add("reverse")
        scanned(w, carry, call, other, (y_tree, stacks, most))


def scanned(w: Writer, carry: Carry, call: str, how: dict[str, str], rows: tuple) -> None:
    """The call of a scan, and what it returns by name. `rows`: the tree and types of ys."""
    out, ys, info = w.name("out"), w.name("ys"), "info" if "return_info" in how else ""
    text = call.replace("@", options.text_of(how))
    w.line(f"{', '.join([out, ys, *([info] if info else [])])} = {text}")
    if info:
        told(w, info)
    ended(w, carry, out)
    tree, stacks, most = rows
    for path, (t, axis) in zip(tree.paths(ys), stacks, strict=False):
        w.let(path, t if axis is None else t.of(with_rows(t, most, axis)))


def with_rows(t: Type, rows: int, axis: int) -> tuple[int, ...]:
    shape = list(t.shape)
    shape.insert(axis % (len(shape) + 1), rows)
    return tuple(shape)


def inputs(w: Writer, most: int) -> tuple:
    """(text, leaves of (array, type of a row, path)), and the axis of each."""
    leaves, axes = [], []
    for _ in range(w.d.number(0, 2)):
        t = leaf_type(w)
        t = t if 0 not in t.shape and t.kind != "bool" else FLOAT
        axis = 0
        if t.shape and w.may("axes", 60):
            axis = w.d.choice((1, -1, None))
        made = f"rows({most}, {value(w, t)}, {axis or 0})"
        name = w.let(made, t.of(with_rows(t, most, axis or 0))).name
        leaves.append((name, t))
        axes.append(axis)
    if not leaves:
        return ("None", []), []
    tree = draw_tree(w.d, len(leaves))
    paths = tree.paths("x")
    full = [(name, t, path) for (name, t), path in zip(leaves, paths, strict=True)]
    text = tree.text([name for name, _ in leaves])
    return (text, full, tree), axes


def scan_options(w: Writer, carry: Carry, most: int, axes: list, xs: tuple) -> dict[str, str]:
    how: dict[str, str] = {}
    if any(a != 0 for a in axes):
        w.tags.add("axes")
        w.d.note("option: in_axes")
        how["in_axes"] = xs[2].text([str(a) for a in axes])
    if w.may("options", 25):
        w.d.note("option: reverse")
        w.tags.add("reverse")
        how["reverse"] = "True"
    if most > 1 and w.may("truncate", 60):
        w.d.note("option: truncate")
        w.tags.add("truncate")
        how["truncate"] = str(w.d.number(1, most))
    if w.may("until", 60):
        w.d.note("option: until")
        w.tags.add("until")
        stop = w.name("stop")
        with w.function(f"{stop}(c, y)"):
            unpacked(w, carry, "c")
            w.line(f"return {predicate(w)}")
        how["until"] = stop
    how |= options.kept(w, True, "truncate" not in how) | options.unrolled(w, True)
    if not how.get("checkpoints") and not how.get("memory"):
        how |= options.flag(w, "_split_transpose", 10)
    return how | carry.named()


def stacked_along(w: Writer, ys: list[Type], how: dict[str, str]) -> list | None:
    if not ys or not w.may("axes", 60):
        return None
    w.tags.add("axes")
    w.d.note("option: out_axes")
    last = ("None",) if "truncate" not in how or "until" not in how else ()
    return [
        w.d.choice((0, *([1, -1] if t.shape else []), *(None for _ in last))) for t in ys
    ]  # fmt: skip


LOOPS = {
    "scan": scan,
    "while": while_loop,
    "fori": fori_loop,
    "lax": lax_scan,
    "in lanes": in_lanes,
}
