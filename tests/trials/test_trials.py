"""Random programs, what is done to them at random, and the reference: do they agree?

`pytest -m trials` runs many, with the options of `conftest.py`, as docs/testing.md says; a few are
part of `pytest -m slow`.
"""

from pathlib import Path

import hypothesis as hyp
import hypothesis.strategies as st
import jax
import pytest

from trials.compare import IllConditioned, Trial, compare
from trials.drawn import draw_trial
from trials.draws import Draws
from trials.implementations import IMPLEMENTATIONS
from trials.printed import printed
from trials.records import Piece
from trials.relations import draw_related
from trials.rewritten import draw_kept, draw_split

# A donated argument may be of no use.
pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

PIECE = 25
"""Programs to a seed."""
FEW, SHORT = 50, 1500
"""The number of programs in `pytest -m slow`, and their most characters.

Three quarters of all are no longer. Longer programs take most of the time, to trace and compile.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "piece" in metafunc.fixturenames:
        few = metafunc.function is test_a_few
        given = metafunc.config.getoption
        count, longest = (FEW, SHORT) if few else (given("--trials"), given("--trials-longest"))
        first = 0 if few else given("--trials-seed")
        sizes = [min(PIECE, count - done) for done in range(0, count, PIECE)]
        who = given("--loops")
        pieces = [
            pytest.param((who, first + at, size, longest), id=f"{who}-{first + at}-{size}")
            for at, size in enumerate(sizes)
        ]
        metafunc.parametrize("piece", pieces)


@st.composite
def trials(draw, longest: int | None) -> Trial:
    trial = draw_trial(Draws(draw))
    hyp.assume(longest is None or len(trial.program.body) <= longest)
    return trial


def settings(seed: int, programs: int):
    """Return the settings with which hypothesis draws the programs of a piece."""
    quiet = {"deadline": None, "database": None, "report_multiple_bugs": False}
    phases = [hyp.Phase.generate, hyp.Phase.shrink]
    checks = {"suppress_health_check": list(hyp.HealthCheck), "phases": phases}
    drawn = hyp.settings(max_examples=programs, **quiet, **checks)
    return lambda test: hyp.seed(seed)(drawn(test))


def run_piece(
    name: str, seed: int, programs: int, longest: int | None, record: Path | None
) -> None:
    implementation = IMPLEMENTATIONS[name]
    piece = Piece(name, seed, programs, longest)
    if piece.is_in(record):
        return

    @settings(seed, programs)
    @hyp.given(trials(longest))
    def run(trial):
        piece.took(trial, outcome(trial, implementation))

    try:
        run()
    except AssertionError as error:
        if record is not None:  # to be looked at while others run
            record.with_suffix(f".{name}-{seed}.txt").write_text(str(error))
        raise
    piece.written_to(record)


def outcome(trial, implementation) -> str:
    """Return the outcome of a trial; raise an error that shows the program if it is wrong."""
    lacks = implementation.cannot(trial.program, trial.pattern, trial.outside)
    if lacks:
        return f"left out: {lacks}"
    try:
        compare(trial, trial.through(implementation))
    except IllConditioned:
        return "compared in part: ill-conditioned"
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n\n{printed(trial)}"
        raise AssertionError(text).with_traceback(error.__traceback__) from None
    return "compared"


@pytest.fixture(autouse=True)
def forgotten():
    """No program is run again."""
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_a_few(piece):
    run_piece(*piece, None)


@pytest.mark.trials
def test_many(piece, request):
    record = request.config.getoption("--trials-record")
    run_piece(*piece, None if record is None else Path(record))


@st.composite
def related(draw):
    d = Draws(draw)
    return d.weighted({draw_related: 2, draw_kept: 1, draw_split: 1})(d)


@pytest.mark.trials
def test_relations(piece):
    """One of them for ten programs that are compared with the reference."""
    name, seed, programs, _ = piece
    if name != "loopkit":
        pytest.skip("their derivatives and options are not all there")

    @settings(seed, max(1, programs // 10))
    @hyp.given(related())
    def run(program):
        assert program.holds(IMPLEMENTATIONS[name]) is not False, program.program.body

    run()
