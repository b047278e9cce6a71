"""The layers of the library, held in place: imports run downward, and one file opens onto jax."""

import ast
import functools as ft
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import loopkit

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "loopkit", ROOT / "tests"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = """
loopkit
_reports _foreign
_loops
_extras
_tracing
_engine.rules
_engine.sweeps
_engine.derivative
_engine.lowering
_engine.passes
_engine.lanes
_engine.facts
_engine
_types _keywords
_programs _plans schedules
_jaxprs
_buffers
_progress
_arguments
_jax
"""
"""From the top: imports stay in a room or go down. Files within a room form no circle."""
LAYERS = [
    ["loopkit" if name == "loopkit" else f"loopkit.{name}" for name in line.split()]
    for line in ROOMS.strip().splitlines()
]

LONGEST = 350
LONGEST_FUNCTION = 60
"""Lines of a function without its docstring."""
MOST_PARAMETERS = 10
"""The most parameters of a function that users do not call."""
MOST_UNPACKED = 5
"""Names that a tuple is unpacked to by position."""
MOST_FRAMES, MOST_FILES = 8, 5
"""Frames and files of loopkit between a call and the body that it traces."""
PRIVATE = ("jax.interpreters", "jax.extend", "jax._src", "jaxlib")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int:
    """The layer with the longest name that the module is part of."""
    places = [
        (len(name), depth)
        for depth, names in enumerate(LAYERS)
        for name in names
        if is_part_of(module, name) and (name != "loopkit" or module == "loopkit")
    ]
    assert places, f"{module} is in no layer of tests/test_architecture.py"
    return max(places)[1]


@ft.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@ft.cache
def modules() -> set[str]:
    return {name_of(path) for path in FILES}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions too."""
    known = modules()
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestors = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*ancestors, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (
                    node.lineno,
                    full if full in known or not is_part_of(base, "loopkit") else base,
                )


def test_imports_run_downward():
    for path in FILES:
        here = layer_of(name_of(path))
        for line, module in imports(path):
            if is_part_of(module, "loopkit"):
                assert layer_of(module) >= here, f"{path}:{line} imports {module} from above"


def test_no_module_imports_itself_in_a_circle():
    """Within a layer too."""
    known = modules()
    graph = {
        name_of(path): {m for _, m in imports(path) if m in known and m != name_of(path)}
        for path in FILES
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            visit(other, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_file_is_left_over():
    """Each is reached from `import loopkit`: what tests alone import is of no use."""
    known = modules()
    graph = {name_of(path): {m for _, m in imports(path)} & known for path in FILES}
    reached, found = set(), {"loopkit"}
    while found:
        reached |= found
        ways = {m for module in found for m in graph[module]}
        found = {m for way in ways for m in known if is_part_of(way, m)} - reached
    assert sorted(known - reached) == []


def test_every_room_has_its_tests():
    """tests/README.md names them, and each test."""
    text = (TESTS / "README.md").read_text()
    rows = re.findall(r"^\| `(\S+?)/?` \| (.*) \|$", text, re.MULTILINE)
    tests = {room: re.findall(r"`([\w/]+)`", row) for room, row in rows}
    paths = (path.relative_to(TESTS).with_suffix("") for path in TESTS.rglob("test_*.py"))
    there = {name for path in paths for name in (str(path), f"{path.parent}/") if name != "./"}
    assert set(tests) == {room.replace(".", "/") for room in ROOMS.split()} - {"loopkit"}
    for room, names in tests.items():
        assert names, f"no test of {room}"
        assert set(names) <= there, room
    named = set(re.findall(r"`([\w/]+)`", text))
    assert not {
        name for name in there if name not in named and f"{name.rpartition('/')[0]}/" not in named
    }


def test_one_door_to_jax():
    for path in FILES:
        for line, module in imports(path):
            if not is_part_of(name_of(path), "loopkit._jax"):
                inside = any(is_part_of(module, private) for private in PRIVATE)
                assert not inside, f"{path}:{line} imports {module}; only loopkit/_jax may"
            assert not is_part_of(module, "equinox.internal"), f"{path}:{line} imports {module}"


def test_no_attribute_leads_past_the_door():
    """`jax._src.core` written out, without an import."""
    for path in FILES:
        if is_part_of(name_of(path), "loopkit._jax"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute):
                written = ast.unparse(node)
                inside = any(is_part_of(written, private) for private in PRIVATE)
                assert not inside, f"{path}:{node.lineno}: {written}"
                assert not is_part_of(written, "eqx.internal"), f"{path}:{node.lineno}: {written}"


def test_schedules_know_nothing_of_jax():
    for path in FILES:
        if is_part_of(name_of(path), "loopkit.schedules"):
            for line, module in imports(path):
                assert module.split(".")[0] not in {"jax", "equinox"}, f"{path}:{line}"


def test_files_are_short():
    others = ("tests", "benchmarks", "examples", "docs")
    for path in (*FILES, *(p for folder in others for p in (ROOT / folder).rglob("*.py"))):
        length = len(path.read_text().splitlines())
        assert length <= LONGEST, f"{path} has {length} lines"


def test_functions_can_be_taken_in():
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                first = (
                    node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                )
                lines = node.body[-1].end_lineno - first.lineno + node.body[0].lineno - node.lineno
                assert lines < LONGEST_FUNCTION, f"{path}: {node.name} has {lines + 1} lines"
                count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                public = hasattr(loopkit, node.name)
                assert public or count <= MOST_PARAMETERS, f"{path}: {node.name} takes {count}"
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                count = len(node.targets[0].elts)
                assert count <= MOST_UNPACKED, f"{path}:{node.lineno} unpacks {count}"


def test_nothing_is_printed():
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"print", "breakpoint"}, f"{path}:{node.lineno}"


def test_the_package_is_names_only():
    """loopkit/__init__.py imports and assigns, and does nothing else."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    docstring, *rest = body
    assert isinstance(docstring, ast.Expr)
    for node in rest:
        assert isinstance(node, allowed), ast.unparse(node)


CALLS = {
    "scan": lambda body: loopkit.scan(lambda x, _: (body(x), x), 1.0, jnp.ones(3)),
    "scan with until": lambda body: loopkit.scan(
        lambda x, _: (body(x), x), 1.0, jnp.ones(3), until=lambda x, _: x > 9, return_info=True
    ),
    "while_loop": lambda body: loopkit.while_loop(lambda x: x < 9, body, 1.0),
    "fori_loop": lambda body: loopkit.fori_loop(0, 3, lambda _, x: body(x), 1.0),
    "fori_loop, traced bounds": lambda body: jax.jit(
        lambda stop: loopkit.fori_loop(0, stop, lambda _, x: body(x), 1.0)
    )(3),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_body_is_not_far_from_the_call(name: str):
    """A reader of a traceback goes through few frames of loopkit, in few files."""
    found: list[str] = []

    def body(x):
        frame = sys._getframe()
        found.clear()
        while frame is not None:
            found.append(frame.f_code.co_filename)
            frame = frame.f_back
        return x * 2

    CALLS[name](body)
    installed = Path(str(loopkit.__file__)).parent
    ours = [file for file in found if Path(file).is_relative_to(installed)]
    assert 1 < len(ours) <= MOST_FRAMES, ours
    assert len(set(ours)) <= MOST_FILES, ours
