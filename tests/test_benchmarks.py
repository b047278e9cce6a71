"""The pages show the figures of docs/benchmarks.json, a file that benchmarks/run.py writes."""

import importlib.util
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs/pictures")]

import figures  # noqa: E402
import findings  # noqa: E402
import measured  # noqa: E402
import page  # noqa: E402

SECTIONS = findings.load()
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in page.pages()}
WHOLLY = "README.md", "docs/index.md", "docs/benchmarks.md"
"""Pages whose figures are all measured by the benchmarks, or said not to be."""


@pytest.mark.every_case
@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_was_measured(name):
    assert page.made(PAGES[name], SECTIONS) == PAGES[name], "python benchmarks/page.py"


@pytest.mark.parametrize("name", PAGES)
def test_no_figure_can_be_edited(name):
    text = PAGES[name]
    for block in page.MADE.finditer(text):
        figure = figures.FIGURE.search(block[0])
        if figure:
            edited = block[0][: figure.start()] + "9" + block[0][figure.start() :]
            assert page.made(edited, SECTIONS) == block[0]
    for paragraph in figures.NAMED.finditer(text):
        asked = figures.values(SECTIONS, paragraph[2])
        for number, figure in enumerate(figures.FIGURE.finditer(paragraph[3])):
            if asked[number % len(asked)] is not None:  # else not of the benchmarks
                at = paragraph.start(3) - paragraph.start() + figure.start()
                edited = paragraph[0][:at] + "9" + paragraph[0][at:]
                assert page.made(edited, SECTIONS) == paragraph[0]


@pytest.mark.parametrize("name", WHOLLY)
def test_every_figure_names_its_record(name):
    assert figures.unnamed(PAGES[name]) == []


def test_every_section_is_on_a_page():
    pages = PAGES["docs/benchmarks.md"] + PAGES["docs/accelerators.md"]
    shown = re.findall(r"<!-- measured: (?:tables|targets) (.*?) -->", pages)
    patterns = " ".join(shown).split()
    for name in SECTIONS:
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name


@pytest.mark.every_case
@pytest.mark.parametrize("row", page.PEERS)
def test_a_row_of_the_first_page_leads_to_its_table(row):
    *_, anchor = page.PEERS[row]
    titles = re.findall(r"^## (.*)$", PAGES["docs/benchmarks.md"], flags=re.M)
    assert anchor[1:] in [re.sub(r"[^\w ]", "", t).lower().replace(" ", "-") for t in titles]


@pytest.mark.every_case
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", measured.PICTURES)
def test_a_picture_was_drawn_from_what_was_measured(name, scheme):
    of, _ = measured.PICTURES[name]
    drawn = ROOT.joinpath(f"docs/pictures/{name}-{scheme}.svg").read_text()
    assert f"docs/benchmarks.json: {measured.digest(of(SECTIONS))}<" in drawn


# --- figures in text -------------------------------------------------------------------------

FOUND = {
    "engine/grad": findings.Section(
        "Gradient",
        "2026-11-24",
        {"jax": "0.12.0"},
        9,
        [
            findings.Record("mlp", "lax.scan", findings.Spread(0.08, 0.081, 0.083), temp_bytes=10),
            findings.Record(
                "mlp",
                "loopkit.scan, 8",
                findings.Spread(0.05, 0.057, 0.06),
                findings.Spread(0.6, 0.7037, 0.8),
                "lax.scan",
                1_930_000,
            ),
        ],
        [findings.Target("grad, mlp: loopkit", 0.85, findings.Spread(0.7, 0.76, 0.8))],
    )
}


def told(names, text):
    return f"<!-- figures\n{names}\n-->\n{text}\n\nAnother paragraph of 5 ms.\n"


def test_figures_are_written_as_they_were():
    names = "engine/grad | mlp | loopkit.scan, * | time, memory, ratio, ratio.low\n-\n"
    names += "engine/* | targets | grad* | most ratio"
    got = figures.refreshed(told(names, "1 s, 1 kB, 0.7123 (0.1), 9.9 and 0.1"), FOUND)
    assert got == told(names, "57 ms, 1.93 MB, 0.7037 (0.6), 9.9 and 0.8")


def test_a_text_may_stand_there_twice():
    names = "engine/grad | mlp | * | least time"
    got = figures.refreshed(told(names, "1 s\nand again 2 s"), FOUND)
    assert got == told(names, "57 ms\nand again 57 ms")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("names", "text", "message"),
    [
        ("engine/grad | mlp | lax.map | time", "1 s", "nothing was measured that is called"),
        ("engine/grad | mlp | * | time", "1 s", "the least, the most or the mean of 2"),
        ("engine/grad | mlp | lax.scan | time, memory", "1 s", "2 figures for 1 in"),
        ("engine/grad | mlp | lax.scan | time", "none", "1 figures for 0 in"),
    ],
)
def test_names_that_do_not_fit(names, text, message):
    with pytest.raises(LookupError, match=re.escape(message)):
        figures.refreshed(told(names, text), FOUND)


def test_what_counts_as_a_figure():
    text = "57.3 ms, 8 kB, 0.71 and 12 B; JAX 0.10.2, 1,000 steps, 64x64, `0.5`, version 0.1.0"
    assert figures.unnamed(text) == ["57.3 ms", "8 kB", "0.71", "12 B"]
    assert figures.unnamed("<!-- figures: none, of nobody -->\n1.5 of 3 s\nand 4 s\n\n") == []


# --- records ---------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "found.json"
    findings.save(file, FOUND)
    assert findings.load(file) == FOUND
    assert findings.load(tmp_path / "none.json") == {}


@pytest.mark.slow
def test_run_replaces_the_sections_that_it_has_measured(tmp_path):
    file = tmp_path / "found.json"
    findings.save(file, FOUND | {"engine/early": FOUND["engine/grad"]})
    options = ["--quick", "--repeats", "3", "--only", "engine/early", "--into", str(file)]
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/run.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        timeout=300,
    )
    found = findings.load(file)
    assert found["engine/grad"] == FOUND["engine/grad"]
    section = found["engine/early"]
    assert section.repeats == 3
    assert section.note.startswith("rough")
    assert {"processor", "memory", "device", "python", "jax", "equinox"} <= set(section.machine)
    assert [r.contender for r in section.records if r.over == r.contender] == [
        "loopkit.while_loop, max_steps=10"
    ]
    for record in section.records:
        assert record.program == "lorenz"
        assert 0 < record.seconds.low <= record.seconds.mid <= record.seconds.high
        assert 0 < record.ratio.low <= record.ratio.mid <= record.ratio.high
        assert record.temp_bytes > 0
        assert record.compile_seconds > 0
    assert [t.at_most for t in section.targets] == [1.3]


@pytest.mark.exhaustive
def test_libraries_that_are_missing_or_fail_do_not_stop_the_others():
    import jax
    import jax.numpy as jnp

    from library_program import Program, reverse, through
    from report import Report

    def scan():
        loss = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, 5)[0].sum()
        return Program(reverse(loss), through(loss, {"checkpoints": "all"}), jnp.ones(3))

    def wrong():
        right = scan()
        return right._replace(ours={"default": lambda x: 2 * right.own["own"](x)})

    def missing():
        import a_library_that_nobody_has  # noqa: F401

    file = ROOT / "benchmarks/programs.py"  # tests/programs has that name, too
    spec = importlib.util.spec_from_file_location("programs_of_benchmarks", file)
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    report = Report(quiet=True)
    found = {"numpy: scan": scan, "none: scan": missing, "numpy: twice": wrong}
    programs.compare(report, 3, found)
    assert [(r.program, r.contender) for r in report.records] == [
        ("numpy: scan", "own"),
        ("numpy: scan", "default"),
        ("numpy: scan", "checkpoints='all'"),
    ]
    assert re.fullmatch(r"numpy \d[\d.]+", report.about["libraries"])
    assert [re.sub(r" by .*", "", note) for note in report.notes] == [
        "without none: scan: No module named 'a_library_that_nobody_has'",
        "FAILED numpy: twice: AssertionError: default differs from own",
    ]


@pytest.mark.slow
def test_a_section_of_which_nothing_is_installed_is_left_out(tmp_path):
    tmp_path.joinpath("numba.py").write_text("raise ImportError('there is no numba')")
    file = tmp_path / "found.json"
    findings.save(file, FOUND)
    ran = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks/run.py"),
            "--only",
            "systems/new",
            "--into",
            str(file),
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert findings.load(file) == FOUND
    assert "systems/new is left out: there is no numba: pip install '.[examples]'" in ran.stdout
