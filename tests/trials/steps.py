"""Steps: carries of random trees, and what a step does with what it is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from trials.buffers import empty_list, new_buffer, store, write_text, written
from trials.draws import BOOL, FLOAT, INT, INTEGERS, KEY, Type
from trials.expressions import expression
from trials.trees import Tree, draw_tree
from trials.values import integer, scalar, value
from trials.writer import Variable, Writer, names_in

DEEPEST = 3
MOST_TRIPS = 12
"""The most trips of the innermost step."""


@dataclass
class Carry:
    """The carry: variables before the loop, and the place of each in its tree."""

    initial: list[Variable]
    tree: Tree
    counter: int | None = None
    """The leaf that counts, if one does."""
    checked: bool = False
    """Whether what is read of buffers and written is checked at run time."""

    @property
    def init(self) -> str:
        return self.tree.text([v.name for v in self.initial])

    def named(self) -> dict[str, str]:
        """The argument that says which leaves are buffers; not of those of a loop around."""
        paths = self.tree.paths("c")
        own = [p for p, v in zip(paths, self.initial, strict=True) if v.buffer == "new buffer"]
        return {"buffers": f"lambda c: [{', '.join(own)}]"} if own else {}


def leaf_type(w: Writer) -> Type:
    """Draw the type of a value that a loop carries, reads or returns."""
    way = w.d.weighted({"float": 12, "int": 2, "other": 4})
    if way == "int":
        return replace(INT, dtype=w.d.choice(INTEGERS))
    if way == "float" or "odd types" not in w.allowed:
        return w.some_float()
    return w.d.choice(
        (
            BOOL,
            KEY,
            FLOAT.of((0,)),
            FLOAT.of((0, 3)),
            Type("complex128"),
            Type("complex128", (3,)),
            Type("complex64", (), True),
        )
    )


def draw_carry(w: Writer, counter: str | None = None) -> Carry:
    """`counter`: how one of the leaves begins."""
    initial = [w.let(value(w, t), t) for t in (leaf_type(w) for _ in range(w.d.number(1, 3)))]
    if any(v.type.inexact and not v.moving for v in initial):
        w.d.note("leaf that begins as a constant")
    checked = False
    if w.may("buffer", 50):
        checked = not w.buffers() and w.may("options", 50)
        initial.append(new_buffer(w, checked))
    if w.may("list", 25) and not checked:
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
    static = w.may("static leaves", 40)
    w.tags.update(["static leaves"] if static else [])
    return Carry(initial, draw_tree(w.d, len(initial), static), at, checked)


def unpacked(w: Writer, carry: Carry, base: str) -> list[Variable]:
    """Its leaves, by name, in the function at hand."""
    found = []
    for path, v in zip(carry.tree.paths(base), carry.initial, strict=True):
        mark = v.buffer.removeprefix("new ") if v.buffer else ""
        moving = v.moving or v.type.kind == "float"
        found.append(w.let(path, v.type, mark, "b" if mark else "v", moving))
    return found


def statements(w: Writer, most: int) -> None:
    """Some lines of a step; not all of what they compute is used."""
    for _ in range(most):
        if not w.d.chance(75):
            return
        deeper = w.may("nests", 20) or (w.deep and w.d.chance(60))
        if deeper and w.depth < DEEPEST and w.trips * 2 <= MOST_TRIPS:
            w.loop(w)
        elif w.buffers() and w.d.chance(60):
            store(w)
        else:
            kind = leaf_type(w) if w.d.chance(25) else w.some_float()
            w.let(expression(w, kind), kind)


def latest(w: Writer, buffer: Variable) -> Variable:
    """A buffer as it is by now."""
    return next(v for v in w.buffers() if v.name == buffer.name or v.origin == buffer.name)


def next_leaf(w: Writer, old: Variable, now: list[Variable]) -> str:
    """Write the next value of a leaf of the carry."""
    if old.buffer:
        return latest(w, old).name
    if old.type.kind == "int" and w.d.chance(60):
        w.d.note("another counter")
        sign = w.d.choice(("+", "-"))
        w.d.note("counter that goes down" if sign == "-" else "counter that goes up")
        return f"{old.name} {sign} {w.d.choice((1, 2))}"
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
    new = expression(w, old.type)
    if old.type.kind == "float" and 0 not in old.type.shape and not w.d.chance(35):
        w.d.note("leaf that hangs on itself")
        return f"(jnp.sin({old.name}) + {new} / 2).astype('{old.type.dtype}')"
    return new


def use(
    w: Writer, carry: Carry, now: list[Variable], after: list[str], left: list[Variable]
) -> None:
    """Most of what a step has computed for nothing goes into a leaf of its carry."""
    able = [i for i, v in enumerate(now) if v.type.kind == "float" and i != carry.counter]
    able = [i for i in able if not now[i].buffer and 0 not in now[i].type.shape]
    if not able or w.d.chance(20):
        w.d.note("dead code")
        return
    i = w.d.choice(able)
    named = set(names_in(" ".join(after)))
    fitting = [v for v in left if v.name not in named and (now[i].type.rough or not v.type.rough)]
    terms = [f"jnp.sin({v.name}).mean()" for v in fitting[-5:]]
    whole = [v.name for v in now if v.type.kind == "int" and v.type.shape == ()]
    if whole and w.d.chance(60):
        w.d.note("slope that hangs on an integer")
        number = w.d.choice(whole)
        terms.append(f"jnp.sin({now[i].name}).mean() * jnp.cos(jnp.asarray({number}, 'float64'))")
    if terms:
        total, dtype = " + ".join(terms), now[i].type.dtype
        after[i] = f"({after[i]} + ({total}) / {3 * len(terms)}).astype('{dtype}')"


def step(
    w: Writer,
    carry: Carry,
    base: str,
    count: Callable[[str], str] | None = None,
    inputs: int = 0,
) -> str:
    """The lines of a step; the tree that the carry becomes. `inputs`: the line they begin at."""
    since = len(w.lines)
    now = unpacked(w, carry, base)
    if carry.counter is not None:
        before_end(w, now[carry.counter])
        w.counter = now[carry.counter].name if now[carry.counter].type.kind == "int" else None
    checked, w.checked = w.checked, w.checked or carry.checked
    for function in carry.tree.functions(base):
        w.d.note("function in the carry")
        kind = w.some_float()
        w.let(f"{function}({value(w, kind)})", kind)
    statements(w, 2)
    for leaf in now:
        if leaf.buffer == "buffer" and w.d.chance(60):
            b = latest(w, leaf)
            written(w, b, write_text(w, b))
    w.checked = checked
    after = [next_leaf(w, v, now) for v in now]
    use(w, carry, now, after, w.unused(inputs or since))
    if carry.counter is not None and count is not None:
        after[carry.counter] = count(now[carry.counter].name)
    return carry.tree.text(after)


def before_end(w: Writer, counter: Variable, limit: str | None = None) -> None:
    """Note the distance to the end, if it is known to be at least 0 while the loop runs."""
    limit = limit or w.limit
    if limit is not None and "infinite slope beyond the last step" in w.allowed:
        w.let(f"jnp.asarray({limit} - {counter.name}, 'float64')", FLOAT, prefix="left")


def within(w: Writer, most: int) -> ExitStack:
    """Enter a step: one loop deeper."""
    stack = ExitStack()
    before = w.depth, w.trips, w.limit, w.counter, w.outside
    w.depth, w.trips, w.outside = w.depth + 1, w.trips * max(1, most), w.names
    w.counter = None
    w.d.note(f"loops {w.depth} deep")

    def leave() -> None:
        w.depth, w.trips, w.limit, w.counter, w.outside = before

    stack.callback(leave)
    return stack


def most_trips(w: Writer) -> int:
    if w.depth == 0 and not w.deep and w.may("long loops", 35):
        w.d.note("long loop")
        w.tags.add("long")
        return MOST_TRIPS // w.trips
    most = 2 if w.deep else 4 if w.depth == 0 else 3
    return max(1, min(most, MOST_TRIPS // w.trips))


def draw_limit(w: Writer, most: int) -> str:
    """A number of steps, known or not, from 0."""
    way = w.d.weighted({"known": 4, "argument": 6, "data": 2, "integer": 2})
    w.d.note(f"number of steps: {way}")
    if w.lanes and way in ("argument", "integer"):
        w.d.note("lanes that stop apart inside")
        last = [v.name for v in w.having(lambda v: v.name.startswith("k"))]
        return f"{last[0]} % {most + 1}"
    if way == "argument":
        given = w.d.choice(("n", "m"))  # from 0 to 4
        return f"{given} % {most + 1}" if most < 4 else f"{given} * {most // 4}"
    if way == "data":
        return f"whole({scalar(w)}, {most})"
    if way == "integer":
        return f"jnp.asarray({integer(w)}, 'int32') % {most + 1}"
    return str(trips(w, most))


def trips(w: Writer, most: int) -> int:
    """So many steps, none at times; of long loops, enough for a schedule to matter."""
    return 0 if w.d.chance(8) else w.d.number(7 if most > 7 else 1, most)


def again(w: Writer, call: str, body: str) -> str:
    """The call of a loop once more: of the same steps, or of some with another constant."""
    w.d.note("the same steps again")
    other = w.twin(body) if w.d.chance(60) else None
    if other is None:
        return call
    w.d.note("the same steps but for a constant")
    return call.replace(f"{body},", f"{other},")


def told(w: Writer, info: str) -> None:
    w.let(f"{info}.steps", INT)
    w.let(f"{info}.stopped", BOOL)


def ended(w: Writer, carry: Carry, out: str) -> None:
    """The carry after a loop: what was a buffer is an array, but in a loop that carries it too."""
    for path, v in zip(carry.tree.paths(out), carry.initial, strict=True):
        if v.buffer in ("buffer", "list"):  # of the loop around
            found = w.let(path, v.type, v.buffer, "b", True)
            w.variables[-1] = replace(found, origin=v.origin or v.name)
        elif v.buffer == "new list":
            w.let(f"{path}.stack()", v.type, moving=True)
            w.let(f"{path}.size", INT)
        else:
            w.let(path, v.type, moving=v.type.inexact)
