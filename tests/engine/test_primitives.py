"""Definitions of the primitives: the loops of lax that their errors name."""

import pytest

from loopkit import _jax
from loopkit._engine import primitives
from loopkit._engine.primitives import dual_p, while_p

from .small_loops import make_loop


@pytest.fixture
def defined(monkeypatch):
    """`defined(primitive)`: what it is defined by, of rules that fail."""

    def fails(*_, **params):
        raise TypeError("not this")

    def define(primitive):
        found = {}
        given = lambda p, evaluate, types, **more: found.update(
            more, evaluate=evaluate, types=types
        )
        monkeypatch.setattr(_jax, "define", given)
        rules = dict.fromkeys(("jvp", "transpose", "dce"), fails)
        primitives.define(primitive, fails, fails, **rules)
        return {name: found[name] for name in (*rules, "evaluate", "types")}

    return define


@pytest.mark.parametrize("primitive", [while_p, dual_p])
def test_which_rules_say_of_which_loop_they_are(primitive, defined):
    """Those for derivatives: what is wrong with a loop itself, lax says too."""
    loop, _ = make_loop(lambda consts, carry, x: (carry, []), [], [0.5], length=3)
    loop = loop.replace(replaced_by="checkpointed")
    named = set()
    for name, rule in defined(primitive).items():
        with pytest.raises(TypeError, match="not this") as error:
            rule(loop=loop)
        if getattr(error.value, "__notes__", []):
            named.add(name)
    assert named == {"jvp", "transpose"} | (
        set() if primitive is while_p else {"evaluate", "types"}
    )
