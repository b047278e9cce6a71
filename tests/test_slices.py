"""The two primitives that read and write slices, each by itself, against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

from derivatives import assert_close
from loopkit import _jax
from loopkit._buffers.slices import read, read_p, write, write_p
from loopkit._buffers.window import Window

TABLE = np.sin(np.arange(15.0) + 1).reshape(5, 3)
ROWS = np.asarray([[1], [-5], [7], [3]])
PLACES = {  # axes, offsets, sizes, starts: none of them the same, wherever they are moved to
    "a row": ((0,), (0, 0), (1, 3), ROWS[1]),
    "a row out of bounds": ((0,), (0, 1), (1, 2), ROWS[2]),
    "rows": ((0,), (0, 0), (1, 3), ROWS),
    "parts of columns": ((1,), (2, 0), (2, 1), np.asarray([[0], [2], [-2]])),
    "elements": ((1, 0), (0, 0), (1, 1), np.asarray([[[0, 4], [2, 4]], [[3, -4], [2, -5]]])),
    "a place that is known": ((), (1, 1), (2, 2), np.zeros(0, int)),
    "an array of one": ((0,), (0, 1), (2, 2), np.asarray([[3]])),
}


def masks_for(batch, sizes):
    """None; a flag for each slice; a flag for each element."""
    flags = lambda shape: np.sin(7.0 * np.arange(np.prod(shape)) + 1.3).reshape(shape) > 0
    return None, flags((*batch, 1, 1)), flags((*batch, *sizes))


def values_for(batch, sizes):
    return np.cos(np.arange(1.0 * np.prod((*batch, *sizes)))).reshape(*batch, *sizes)


def slices_of(window, starts, reads):
    """For each slice its number, where it is, and whether it counts."""
    for k in np.ndindex(starts.shape[:-1]):
        at = np.asarray(window.offsets)
        for axis, start in zip(window.axes, starts[k], strict=True):
            at[axis] = start + TABLE.shape[axis] if start < 0 else start
        inside = np.clip(at, 0, np.asarray(TABLE.shape) - window.sizes)
        is_inside = (inside == at).all()
        moved = window.mode == "clip" or (reads and window.mode != "drop")
        part = tuple(slice(a, a + n) for a, n in zip(inside, window.sizes, strict=True))
        yield k, part, is_inside or moved


def read_by_hand(b, starts, window):
    found = np.zeros((*starts.shape[:-1], *window.sizes))
    for k, part, counts in slices_of(window, starts, True):
        found[k] = b[part] * counts
    return found


def written_by_hand(b, value, starts, window, mask=None, add=False):
    b, mask = b.copy(), np.broadcast_to(True if mask is None else mask, value.shape)
    for k, part, counts in slices_of(window, starts, False):
        yes = mask[k] & counts
        b[part] = np.where(yes, value[k] + add * b[part], b[part])
    return b


def cases(places=PLACES, modes=("clip", "drop", "promise_in_bounds")):
    for name, mode in itertools.product(places, modes):
        *window, starts = PLACES[name]
        batch, sizes = starts.shape[:-1], window[2]
        for number, mask in enumerate(masks_for(batch, sizes)):
            yield f"{name} {mode} {number}", Window(*window, mode), starts, mask, batch, sizes


def test_values():
    def all_of_them(b, read, write):
        found = {}
        for name, window, starts, mask, batch, sizes in cases():
            value = values_for(batch, sizes)
            found[name] = read(b, starts, window)
            for add in (False, True):
                found[name, add] = write(b, value, starts, window, mask, add)
        return list(found.values())

    reads = lambda b, starts, window: read(b, jnp.asarray(starts), window)[0]
    writes = lambda b, value, starts, *rest: write(b, value, jnp.asarray(starts), *rest)
    got = jax.jit(lambda b: all_of_them(b, reads, writes))(TABLE)
    for one, other in zip(got, all_of_them(TABLE, read_by_hand, written_by_hand), strict=True):
        np.testing.assert_allclose(one, other, 1e-15)


def test_what_a_mask_leaves_out_is_in_no_ones_way():
    """It may be where another is, or where nothing is."""
    window = Window((0,), (0, 0), (1, 3), "drop")
    starts, mask = np.asarray([[1], [1], [2], [2]]), np.asarray([True, False, False, True])
    value, mask = values_for((4,), (1, 3)), mask[:, None, None]
    got = write(jnp.asarray(TABLE), value, jnp.asarray(starts), window, mask)
    np.testing.assert_array_equal(got, written_by_hand(TABLE, value, starts, window, mask))


def matrix(f, *shapes):
    """Return the matrix of a linear function of several arrays."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    columns = []
    for one in np.eye(sum(sizes)):
        parts = np.split(one, np.cumsum(sizes)[:-1])
        columns.append(f(*(p.reshape(s) for p, s in zip(parts, shapes, strict=True))).ravel())
    return np.stack(columns, -1), np.cumsum(sizes)[:-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("add", "fresh"), [(False, False), (False, True), (True, False)])
def test_transposes(add, fresh):
    """Transpose in the values and in the buffer, together and each by itself. If nobody asks for
    the cotangent of the old entries, they have that of the new ones."""
    w = np.cos(3.0 * np.arange(15)).reshape(5, 3)

    def all_of_them(w):
        places = "a row out of bounds", "rows", "a place that is known"
        for _, window, starts, mask, batch, sizes in cases(places, ("drop",)):
            value = values_for(batch, sizes)
            how = {"window": window, "add": add, "fresh": fresh, "alone": True}
            masks = [] if mask is None else [jnp.asarray(mask)]
            f = lambda b, v, at=starts, m=masks, how=how: write_p.bind(b, v, at, *m, **how)[0]
            both = jax.linear_transpose(f, TABLE, value)(w)
            alone = jax.linear_transpose(lambda v, f=f: f(jnp.zeros((5, 3)), v), value)(w)
            zeros = jnp.zeros(value.shape)
            buffer = jax.linear_transpose(lambda b, f=f, v=zeros: f(b, v), TABLE)(w)
            yield [*both, *alone, *buffer], (window, starts, mask, value.shape)

    described = [of for _, of in all_of_them(w)]
    got = jax.jit(lambda w: [found for found, _ in all_of_them(w)])(w)
    for found, (window, starts, mask, shape) in zip(got, described, strict=True):
        hand = lambda b, v, a=(starts, window, mask): written_by_hand(b, v, *a, add)
        of, (split,) = matrix(hand, (5, 3), shape)
        of_buffer, of_value = np.split(of.T @ w.ravel(), [split])
        of_buffer, of_value = w if fresh else of_buffer.reshape(5, 3), of_value.reshape(shape)
        for one, other in zip(found, [of_buffer, of_value, of_value, of_buffer], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-15)


def test_transposes_of_reads():
    """The value read, the buffer that is returned, or both have a cotangent."""
    w = np.cos(3.0 * np.arange(15)).reshape(5, 3)
    for name in ("rows", "a row out of bounds"):
        *window, starts = PLACES[name]
        window = Window(*window, "drop")
        f = lambda b, a=(starts, window): read(b, *a)
        value = values_for(starts.shape[:-1], window.sizes)
        of, _ = matrix(lambda b, a=(starts, window): read_by_hand(b, *a), (5, 3))
        added = (of.T @ value.ravel()).reshape(5, 3)
        assert_close(jax.linear_transpose(f, TABLE)((jnp.asarray(value), w))[0], w + added)
        assert_close(jax.linear_transpose(lambda b, f=f: f(b)[0], TABLE)(value)[0], added)
        assert_close(jax.linear_transpose(lambda b, f=f: f(b)[1], TABLE)(w)[0], w)


def test_tangents():
    """Either operand alone has a tangent, or both, or neither."""
    *window, starts = PLACES["rows"]
    window, mask = Window(*window, "drop"), masks_for((4,), (1, 3))[2]
    value, at = values_for((4,), (1, 3)), jnp.asarray(starts)
    f = lambda b, v: write(b, v, at, window, mask)
    g = lambda b, v: written_by_hand(b, v, starts, window, mask)
    b_dot, v_dot = np.cos(TABLE), np.sin(3 * value)
    assert_close(jax.jvp(f, (TABLE, value), (b_dot, v_dot))[1], g(b_dot, v_dot))
    assert_close(jax.jvp(lambda b: f(b, value), (TABLE,), (b_dot,))[1], g(b_dot, 0 * value))
    assert_close(jax.jvp(lambda v: f(TABLE, v), (value,), (v_dot,))[1], g(0 * TABLE, v_dot))


def test_what_is_written_over_has_no_cotangent():
    window, at = Window((0,), (0, 0), (1, 3), "drop"), jnp.asarray([[1], [4]])
    f = lambda b, add: write(b, jnp.ones((2, 1, 3)), at, window, None, add)
    for add in (False, True):
        back = jax.vjp(lambda b, add=add: f(b, add), TABLE)[1](jnp.ones((5, 3)))[0]
        assert back[:, 0].tolist() == ([1] * 5 if add else [1, 0, 1, 1, 0])


def test_what_has_no_derivative_gives_none():
    """Symbolically: for each operand that has one."""
    *window, at = PLACES["rows"]
    how = {"window": Window(*window, "drop"), "add": False, "fresh": False, "alone": False}
    operands = jnp.asarray(TABLE), jnp.zeros((4, 1, 3)), jnp.asarray(at)
    types = [jax.typeof(v) for v in operands]
    none = [_jax.float0_zero(t) for t in types]
    out, tangents = ad.primitive_jvps[write_p](operands, none, **how)
    assert [type(v) for v in (*out, *tangents)] == [type(operands[0]), ad.Zero]
    of_both = [ad.UndefinedPrimal(t) for t in types[:2]]
    transpose = ad.primitive_transposes[write_p]
    for given in (of_both, [of_both[0], operands[1]], [operands[0], of_both[1]]):
        cts = transpose(none[:1], *given, operands[2], **how)
        kinds = [ad.Zero if ad.is_undefined_primal(v) else type(None) for v in given]
        assert [type(v) for v in cts] == [*kinds, type(None)]


@pytest.mark.exhaustive
def test_lanes():
    """Each as if it were alone, whatever of a buffer, its values, masks and places differs."""
    *window, starts = PLACES["rows"]
    value, mask = values_for((4,), (1, 3)), masks_for((4,), (1, 3))[2]
    scale, turn = jnp.asarray([1.0, 2.0, -0.5]), jnp.asarray([0, 1, 2])

    def f(b, v, at, m, window):
        found, after = read(b, at, window)
        return found, write(after, v, at, window, m), write(after, v, at, window, None, True)

    chosen = [*itertools.product((None, 0, 1, 2), (None, 1), (None, -1), (None, 2))][1::3]
    lanes = [
        jnp.asarray(TABLE) * scale[:, None, None],
        jnp.asarray(value) * scale[:, None, None, None],
        jnp.asarray(starts) + turn[:, None, None],
        jnp.asarray(mask) ^ (turn == 1)[:, None, None, None],
    ]

    def every(window, by_vmap):
        for axes in chosen:
            pairs = list(zip(lanes, axes, strict=True))
            if by_vmap:
                operands = [v[0] if a is None else jnp.moveaxis(v, 0, a) for v, a in pairs]
                yield jax.vmap(lambda *operands: f(*operands, window), axes)(*operands)
            else:
                one = [f(*(v[0 if a is None else k] for v, a in pairs), window) for k in range(3)]
                yield jax.tree.map(lambda *v: jnp.stack(v), *one)

    window = Window(*window, "drop")
    run = lambda by_vmap: jax.jit(lambda: list(every(window, by_vmap)))()
    assert_close(run(True), run(False))


def test_who_waits_for_whom():
    """A write waits until what is read before it has been; not the cotangents of one alone."""
    *window, at = PLACES["rows"]
    at, window, value = jnp.asarray(at), Window(*window, "drop"), jnp.ones((4, 1, 3))
    found = jax.make_jaxpr(lambda b: read(b, at, window))(TABLE)
    assert found.eqns[-1].params["held"]
    for alone in (False, True):
        how = {"window": window, "add": False, "fresh": False, "alone": alone}
        f = lambda v, how=how: write_p.bind(jnp.zeros((5, 3)), v, at, **how)[0]
        back = jax.make_jaxpr(lambda w, f=f: jax.linear_transpose(f, value)(w))(TABLE)
        held = [eqn.params["held"] for eqn in back.eqns if eqn.primitive is read_p]
        assert held == [not alone]


def test_reads_are_in_no_branch():
    """A GPU waits there. What is held is behind a barrier before and after, and nothing else."""
    *window, at = PLACES["rows"]
    window = Window(*window, "drop")
    for held in (True, False):
        f = jax.jit(lambda b, at, held=held: read(b, at, window, held))
        text = f.trace(TABLE, jnp.asarray(at)).lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.case" not in text
        assert text.count("stablehlo.optimization_barrier") == 2 * held
    f = lambda b, v: write(b, v, jnp.asarray(at), window)
    back = lambda w: jax.linear_transpose(f, TABLE, jnp.zeros((4, 1, 3)))(w)
    text = jax.jit(back).trace(TABLE).lower(lowering_platforms=("cpu",)).as_text()
    # A compiler for CPUs that drops barriers needs a branch there.
    assert ("stablehlo.case" in text) == (not _jax.KEEPS_BARRIERS)


def test_what_compilers_are_promised():
    """Compilers are promised that rows that are set differ; rows that are added to may repeat."""
    *window, at = PLACES["rows"]
    window = Window(*window, "drop")
    for add in (False, True):
        f = lambda b, at, add=add: write(b, jnp.ones((4, 1, 3)), at, window, None, add)
        text = jax.jit(f).lower(TABLE, jnp.asarray(at)).as_text()
        assert f"unique_indices = {str(not add).lower()}" in text


def test_a_read_that_nobody_uses_asks_for_no_place():
    *window, at = PLACES["rows"]
    window = Window(*window, "drop")

    def f(b, at):
        _, b = read(b, at, window)
        return read(b, at + 1, window)[1]

    jaxpr = jax.make_jaxpr(f)(TABLE, jnp.asarray(at)).jaxpr
    transpose_only, used = _jax.dce(jaxpr, [True], [False, False])
    assert list(used) == [True, False]
    assert [eqn.params["value"] for eqn in transpose_only.eqns] == [False, False]
    assert_close(_jax.call_jaxpr(transpose_only)(TABLE), [jnp.asarray(TABLE)])
