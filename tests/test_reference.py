"""The reference has every public name once, and no other, and the types in their signatures."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import loopkit
from loopkit import schedules
from public_names import PUBLIC
from test_docs import python_blocks, run_in_fresh_interpreter

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
TYPES = ROOT / "docs/reference/types.md"
MODULES = {
    name: value
    for name, value in vars(schedules).items()
    if inspect.ismodule(value) and not name.startswith("_")
}
ALIASES = {
    target.id
    for module in (loopkit._types, loopkit._buffers.keywords)
    for node in ast.parse(inspect.getsource(module)).body
    if isinstance(node, ast.AnnAssign) and isinstance(target := node.target, ast.Name)
}
"""Types that are not classes."""
UNDOCUMENTED = {"tree_flatten", "tree_flatten_with_keys", "tree_unflatten"}
"""Public methods that JAX calls."""


def directives(page):
    return re.findall(r"^::: loopkit\.(\S+)$", page.read_text(), flags=re.MULTILINE)


def listed_types():
    """The types on the page of types, where a module may be listed as a whole."""
    names = set()
    for path in directives(TYPES):
        try:
            names |= set(vars(importlib.import_module(f"loopkit.{path}")))
        except ModuleNotFoundError:
            names.add(path.rpartition(".")[2])
    return names


def members(value):
    """The class's own public methods and properties, as functions."""
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and name not in UNDOCUMENTED and inspect.isfunction(function):
            yield name, function


def annotated(value):
    """Whatever has annotations that a reader of the page of `value` sees."""
    yield value
    if inspect.isclass(value):
        yield from (function for _, function in members(value))


def named_in(annotations):
    """The names in annotations, which are texts where loopkit wrote them."""
    for text in filter(lambda annotation: isinstance(annotation, str), annotations.values()):
        yield from (n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name))


def is_ours(name, value):
    """Whether loopkit defines what `name` means where `value` is written: not Python, nor JAX."""
    meaning = vars(sys.modules[value.__module__]).get(name)
    return str(getattr(meaning, "__module__", "")).startswith("loopkit") or name in ALIASES


def test_every_public_name_has_one_place_and_every_place_is_of_a_public_name():
    listed = sorted(name for page in PAGES if page != TYPES for name in directives(page))
    modules = [f"schedules.{name}" for name in MODULES]
    assert listed == sorted([*PUBLIC, *modules]), (
        "a public name goes on a page of docs/reference/ as `::: loopkit.name`, and into api.md"
    )


def test_the_overview_links_to_every_public_name_and_every_page():
    overview = (ROOT / "docs/api.md").read_text()
    linked = re.findall(r"\]\[loopkit\.(\w+)\]", overview)
    assert sorted(linked) == sorted(PUBLIC)
    assert all(f"(reference/{page.name})" in overview for page in PAGES)
    assert all(f"reference/{page.name}" in (ROOT / "mkdocs.yml").read_text() for page in PAGES)


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_types_in_signatures_are_on_the_page_of_types(name):
    known = {*PUBLIC, *listed_types()}
    for value in annotated(PUBLIC[name]):
        for word in named_in(vars(value).get("__annotations__", {})):
            assert word in known or not is_ours(word, value), (
                f"`{word}`, in the signature of {value.__qualname__}, goes into {TYPES.name}"
            )


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_what_readers_can_call_says_what_it_is(name):
    value = PUBLIC[name]
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        said = [name for name, function in members(value) if function.__doc__]
        ours = inspect.getdoc(value)
        assert all(name in said or f"`b.{name}`" in ours for name, _ in members(value))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_schedules_run(name, tmp_path):
    page = tmp_path / f"{name}.md"
    page.write_text(inspect.getdoc(MODULES[name]))
    if python_blocks(page):
        run_in_fresh_interpreter(page, tmp_path)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*PUBLIC, *MODULES])
def test_examples_are_code_that_is_run(name):
    """No indented block, other than what a function amounts to in Python, and formulas."""
    text = inspect.getdoc(getattr(loopkit, name, None) or MODULES[name])
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for block in re.findall(r"\n\n((?:    .*\n?)+)", text):
        assert block.lstrip().startswith("def ") or "loopkit." not in block


ARGUMENTS = ROOT / "docs/reference/arguments.md"
LOOPS = {
    name: inspect.signature(getattr(loopkit, name)).parameters
    for name in (
        *("while_loop", "scan", "fori_loop", "unbounded_scan", "ragged_scan"),
        *("blocked", "checkpointed", "replace_lax_loops"),
    )
}
POSITIONAL = {"fn", "xs"}
"""Arguments with a default that are not settings."""


def rows(heading):
    """The rows of the first table below a heading of the page of arguments, as lists of cells."""
    text = ARGUMENTS.read_text().partition(f"{heading}\n")[2]
    lines = re.search(r"^\|.*?(?=^$|\Z)", text, re.MULTILINE | re.DOTALL)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_of_arguments_names_each_keyword_where_it_is_taken():
    told = {}
    for name, _, default, functions in rows("# Keyword arguments"):
        for function in re.findall(r"`(\w+)`", functions):
            told[function, re.search(r"`(\w+)`", name)[1]] = re.findall(r"`([^`]*)`", default)
    taken = {
        (function, name): [] if p.default is p.empty else [repr(p.default)]
        for function, parameters in LOOPS.items()
        for name, p in parameters.items()
        if (p.kind is p.KEYWORD_ONLY or p.default is not p.empty) and name not in POSITIONAL
    }
    assert told.keys() == taken.keys()
    assert all(set(taken[key]) <= set(told[key]) for key in taken)
    defaults = {(name, text) for (_, name), texts in taken.items() for text in texts}
    assert {(name, text) for (_, name), texts in told.items() for text in texts} == defaults


def sin(x, _=None):
    return jnp.sin(x), None


def doubled(**how):
    return lambda x: loopkit.while_loop(lambda x: x < 5.0, lambda x: 2 * x, x, **how)


def symbolic():
    (n,) = jax.export.symbolic_shape("n")
    loop = lambda xs: loopkit.scan(lambda c, x: (c + x, c), 0.0, xs, until=lambda c, _: c > 3)
    return jax.export.export(jax.jit(loop))(jax.ShapeDtypeStruct((n,), jnp.float32))


def written_outside():
    total = jax.new_ref(jnp.zeros(()))

    def step(x, _):
        total[...] += x
        return x, None

    return loopkit.scan(step, 1.0, length=3, debug="finite")


def written_by_lax(x):
    total = jax.new_ref(x)

    def step(x, _):
        total[...] += x
        return x, None

    return jax.lax.scan(step, x, length=3)[0]


def twice_through_a_custom_vjp():
    sin = jax.custom_vjp(jnp.sin)
    sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, w: (w * jnp.cos(x),))
    memory = {"device": "20 kB", "host": "100 kB"}
    loop = lambda x: loopkit.scan(lambda x, _: (sin(x), None), x, None, 2000, memory=memory)[0]
    return jax.hessian(lambda x: jnp.sum(loop(x)))(jnp.ones(10))


REFUSED = {
    "`checkpoints` and `memory`": lambda: doubled(checkpoints=2, memory="1 MB")(1.0),
    '`checkpoints="all"` or a policy, and no bound': lambda: doubled(checkpoints="all")(1.0),
    "a `Plan` that stores every step, and no": lambda: jax.grad(
        doubled(checkpoints=loopkit.Plan(0, keeps_all=True))
    )(1.0),
    "`measure=True`, and no `memory`": lambda: loopkit.checkpointed(jnp.sin, measure=True),
    "`measure=True` for a function": lambda: jax.vmap(
        loopkit.checkpointed(lambda x: jax.lax.pmean(x, "i"), memory=9, measure=True), axis_name="i"
    )(jnp.ones(2)),
    "`truncate` and a `Plan`": lambda: loopkit.scan(
        sin, 1.0, length=9, truncate=3, checkpoints=loopkit.Plan(2)
    ),
    '`lanes="flatten"` and `progress`': lambda: doubled(lanes="flatten", progress="line")(1.0),
    "`_split_transpose=True`": lambda: loopkit.scan(
        sin, 1.0, length=9, _split_transpose=True, until=lambda x, _: x < 0
    ),
    "`unroll=True`": lambda: doubled(unroll=True)(1.0),
    "a symbolic `length`": symbolic,
    "`length`, and `xs`": lambda: loopkit.scan(sin, 1.0, jnp.ones(3), 4),
    "neither `length` nor `xs`": lambda: loopkit.scan(sin, 1.0),
    "`only` that chooses none": lambda: loopkit.checkpointed(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x + 1, x), only=lambda site: False
    )(1.0),
    "`strict=True`, and a loop": lambda: loopkit.checkpointed(written_by_lax, strict=True)(1.0),
    '`debug="bounds"`': lambda: loopkit.checkpointed(jnp.sin, debug="bounds"),
    '`debug="finite"`, and steps that use a reference': written_outside,
    "checkpoints on the host": twice_through_a_custom_vjp,
}


def test_the_page_of_arguments_says_what_is_refused():
    refused = [cells[0] for cells in rows("## Combinations that are errors")]
    assert len(refused) == len(REFUSED)
    for text, (begin, call) in zip(refused, REFUSED.items(), strict=True):
        assert text.startswith(begin)
        with pytest.raises((ValueError, TypeError, NotImplementedError), match="loopkit"):
            call()
