"""A pytest plugin that runs each test inside `loopkit.replace_lax_loops`.

Use it with `pytest -p pytest_loopkit --loopkit-replaces`. It is a module of its own, which pytest
loads only if asked to: importing `loopkit` imports JAX, and a project's `conftest.py` may have to
set JAX's environment first."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

REPLACED = "loops of lax replaced"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("loopkit").addoption(
        "--loopkit-replaces",
        action="store_true",
        help="run each test, with its fixtures, inside loopkit.replace_lax_loops()",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("loopkit_replaces"):
        config.pluginmanager.register(Replacing(), "loopkit-replaces")


class Replacing:
    """Runs tests inside `replace_lax_loops`, and counts the loops: without any, passing proves
    nothing."""

    def __init__(self) -> None:
        self.in_this_test = 0
        self.of_each_test: list[Any] = []
        self.only = self.count  # one object, so that JAX does not retrace what it has traced

    def count(self, site: Any) -> bool:
        self.in_this_test += 1
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        import loopkit

        self.in_this_test = 0
        with loopkit.replace_lax_loops(only=self.only, strict=False):
            return (yield)

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        item.user_properties.append((REPLACED, self.in_this_test))  # reports carry it

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.of_each_test += [n for name, n in report.user_properties if name == REPLACED]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        tests = sum(count > 0 for count in self.of_each_test)
        terminalreporter.write_line(
            f"loopkit replaced {sum(self.of_each_test)} loops of lax, in {tests} of "
            f"{len(self.of_each_test)} tests"
        )
