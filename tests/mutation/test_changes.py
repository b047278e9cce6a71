"""One place of a file at a time is changed, and nothing that no test can see."""

import sys

import pytest

from mutation.changes import all_changes, changed

TEXT = '''
"""Nothing here: 1 + 1."""
from functools import lru_cache

LARGE = 3
SIZE: tuple[int, ...] = (4 * 2,)


@lru_cache(maxsize=8)
def f(a: int = 5, *, b=False):
    assert a > 0, "positive"
    if a:
        a += max(1, 2)
    return [f"{x:3}" if x < a else "" for x, _ in zip([a], [b], strict=True)]
'''
CHANGES = {
    "3  ->  4": False,
    "4 * 2  ->  4 // 2": False,
    "4  ->  5": False,
    "2  ->  3": None,  # at import, and in the function
    "5  ->  6": False,
    "False  ->  True": False,
    "if a:  ->  if not a:": True,
    "a += max(1, 2)  ->  a -= max(1, 2)": True,
    "max  ->  min": True,
    "1  ->  2": True,
    "f'{x:3}' if x < a else ''  ->  '' if x < a else f'{x:3}'": True,
    "x < a  ->  x <= a": True,
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(TEXT)
    return path


def test_what_is_changed(path):
    found = all_changes(path)
    assert {change.said for change in found} == set(CHANGES)
    assert len(found) == len(CHANGES) + 1
    for change in found:
        assert CHANGES[change.said] in (None, change.in_function)
        assert change.line in change.lines


def test_one_place_at_a_time(path):
    codes = [changed(path, change) for change in [None, *all_changes(path)]]
    assert len(set(codes)) == len(codes)
    values = {}
    exec(codes[1], values)
    assert values["LARGE"] == 4
    assert values["f"](1) == [""]


def test_lines_stay_where_they_are(path):
    for change in all_changes(path):
        lines = {line for *_, line in changed(path, change).co_lines() if line}
        assert lines == {line for *_, line in changed(path, None).co_lines() if line}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`sys.monitoring`")
def test_code_that_is_never_reached():
    """The compiler makes none of it, nor of functions in it."""
    from mutation import lines

    text = "def f(x):\n    while {}:\n        x = [x + y for y in (lambda: x)()]\n    return x\n"
    old, new = (compile(text.format(value), "module", "exec") for value in (True, False))
    assert [a.co_name for a, _ in lines.pairs(old, new)] == ["<module>", "f"]
