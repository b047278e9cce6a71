"""Copies that compiled loops make."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit._reports.in_place import CompiledModule

ROWS = jnp.ones((300, 7))


def in_rows(xs, loop=loopkit.scan, **how):
    def body(c, _):
        i, ys = c
        return (i + 1, ys.at[i].set(xs[i] * jnp.sin(ys[i - 1]))), None  # the line that copies

    return loop(body, (0, xs), None, 300, **how)[0][1]


THIS = Path(__file__).read_text().splitlines()
LINE = next(i for i, line in enumerate(THIS, 1) if line.endswith("# the line that copies"))


def test_report_names_leaf_and_line():
    report = loopkit.in_place_report(in_rows, ROWS, grad=True)
    assert not report
    copies = [c for c in report.copies if c.source]
    assert {c.type for c in copies} == {"f64[300,7]"}
    assert {c.bytes for c in copies} == {300 * 7 * 8}
    assert {c.leaf for c in copies} == {"`init[1]` of loopkit.scan"}
    assert any(c.source == f"{__file__}:{LINE}" for c in copies)
    assert "16,800 bytes of `init[1]` of loopkit.scan at " in str(report)


def test_fails_with_the_report():
    with pytest.raises(AssertionError, match=r"f64\[300,7\], 16,800 bytes of `init\[1\]`"):
        assert loopkit.in_place_report(in_rows, ROWS, grad=True)
    report = loopkit.in_place_report(in_rows, ROWS, grad=True, min_bytes=16_801)
    assert report
    assert "no copy of 16,801 bytes or more" in str(report)


@pytest.mark.parametrize("grad", [False, True])
def test_arguments_that_are_no_arrays_are_static(grad):
    def f(rows, how):
        xs = rows["xs"] * how[1]
        return how[2](in_rows(xs)) if how[0] == "copies" else how[2](xs)

    rows = {"xs": jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype), "name": "a"}
    report = loopkit.in_place_report(f, rows, ("copies", 2, jnp.sin), grad=grad)
    assert report.loops > 0
    assert bool(report) is not grad
    assert loopkit.in_place_report(f, rows, ("none", 2, jnp.sin), grad=grad).loops == 0


def test_loops_of_lax():
    by_lax = lambda xs: in_rows(xs, jax.lax.scan)
    assert loopkit.in_place_report(by_lax, ROWS)
    with pytest.raises(AssertionError, match=r"`carry leaf 1` of lax.scan"):
        assert loopkit.in_place_report(by_lax, ROWS, grad=True)


def test_buffers_are_in_place():
    report = loopkit.in_place_report(
        lambda xs: in_rows(xs, buffers=lambda c: c[1]), ROWS, grad=True
    )
    assert report.loops > 1


@pytest.mark.slow
def test_a_window_that_is_read_after_a_write():
    """A gather, as from a cache of keys, must not take the write before it into itself."""

    def decode(q, keys):
        def body(i, carry):
            q, keys = carry
            keys = keys.at[i % 300].set(jnp.cos(q))
            found = keys[(i - jnp.arange(9)) % 300]
            return jax.nn.softmax(found @ q) @ found, keys

        return loopkit.fori_loop(0, 700, body, (q, keys), buffers=(False, True))[0]

    assert loopkit.in_place_report(decode, ROWS[0], ROWS)
    assert loopkit.in_place_report(decode, ROWS[0], ROWS, grad=True)


def test_lanes_that_stop_apart_select_no_buffer():
    def f(xs, n):
        step = lambda c: (c[0] + 1, c[1].at[c[0]].set(jnp.sin(xs[c[0]])))
        init, how = (0, jnp.zeros_like(xs)), {"max_steps": 300, "buffers": lambda c: c[1]}
        return jnp.sum(loopkit.while_loop(lambda c: c[0] < n, step, init, **how)[1])

    lanes, counts = jnp.stack([ROWS, ROWS]), jnp.asarray([7, 200])
    gradient = jax.jit(jax.vmap(jax.grad(f)))
    program = CompiledModule.parse(gradient.lower(lanes, counts).compile().as_text())
    roots = {"dynamic-update-slice", "scatter", "get-tuple-element", "parameter", "bitcast"}
    for body in program.loop_bodies:
        for i in program.computations[body].values():
            if i.bytes >= lanes.nbytes:
                inner = [j for _, name in i.called() for j in program.computations[name].values()]
                made = [j.opcode for j in inner if j.root] or [i.opcode]
                assert set(made) <= roots, f"{i.name} makes {i.type} by {made}"


def test_arguments():
    shape = jax.ShapeDtypeStruct((300, 7), jnp.float32)
    mixed = lambda xs, n: (in_rows(xs, buffers=lambda c: c[1]), n + 1)
    assert loopkit.in_place_report(mixed, shape, jnp.int32(3), grad=True)
    with pytest.raises(TypeError, match="in_place_report: `fn` must be a function"):
        loopkit.in_place_report(3)


TEXT = """HloModule f, is_scheduled=true

FileNames
1 "/a.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=30 end_column=34}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=30 end_column=34}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%inner (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %copy.9 = f32[4]{0} copy(%p), metadata={op_name="x" source_file="/b.py" source_line=3}
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %gte = f32[4]{0} get-tuple-element(%arg), index=1
  %fusion = f32[4]{0} fusion(%gte), kind=kLoop, calls=%inner, metadata={stack_frame_id=2}
  ROOT %t = (s32[], f32[4]{0}) tuple(%gte, %fusion)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %copy.1 = f32[4]{0} copy(%x)
  ROOT %w = (s32[], f32[4]{0}) while(%copy.1), condition=%cond, body=%body
}
"""


def test_parsing():
    program = CompiledModule.parse(TEXT)
    assert program.loop_bodies == ["body"]
    assert program.runs("body") == ["body", "inner"]
    copy, fusion = program.computations["inner"]["copy.9"], program.computations["body"]["fusion"]
    assert (copy.opcode, copy.bytes, copy.operands, copy.root) == ("copy", 16, ("p",), True)
    assert program.lines(copy) == [("/b.py", 3)]
    assert program.lines(fusion) == [("/a.py", 9), ("/a.py", 8)]
    assert program.computations["body"]["gte"].number("index") == 1
    assert program.computations["body"]["arg"].bytes == 0
    sizes = {"pred[3]": 3, "bf16[2,2]{1,0}": 8, "c64[]": 8, "s8[5]": 5, "f8e4m3fn[4]": 4}
    for kind, size in sizes.items():
        made = type(copy)("x", kind, "copy", (), "", False)
        assert made.bytes == size, kind


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("checkpoints", [None, 1000, "all"])
def test_steps_that_do_not_count_copy_nothing(unroll, checkpoints):
    """The last of several steps to an iteration may lie beyond the end."""

    def f(x):
        def body(s, _):
            return (s[0] + 1, jnp.sin(s[1])), s[1]

        until = lambda s, y: s[0] >= 337
        how = {"unroll": unroll, "checkpoints": checkpoints}
        return loopkit.scan(body, (0, x), None, length=1000, until=until, **how)

    assert loopkit.in_place_report(f, jnp.ones(7), min_bytes=7000)
    assert loopkit.in_place_report(
        lambda x: jnp.sum(f(x)[1]), jnp.ones(7), min_bytes=7000, grad=True
    )
