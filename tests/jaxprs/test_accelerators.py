"""The predicted times of equations on an accelerator, and which one a loop is planned for."""

import contextlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import loopkit
from loopkit._jaxprs.accelerators import GPUS, TPUS, planned_for
from loopkit._jaxprs.cost import nanoseconds
from loopkit._plans.costs import StepCosts

H100, V5E = GPUS[1], TPUS[3]
T4 = next(gpu for gpu in GPUS if gpu.kind == "T4")


def at(kind, platform):
    """Return a context in which code is traced for a device that need not be here."""
    device = AbstractDevice(kind, None, platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "platform", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("NVIDIA H100 PCIe", "gpu", "H100 PCIe"),
        ("NVIDIA H200", "gpu", "H200"),
        ("NVIDIA GH200 480GB", "gpu", "GH200"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "A100"),
        ("NVIDIA A100-SXM4-80GB", "gpu", "A100-SXM4-80GB"),
        ("NVIDIA L40S", "gpu", "L40S"),
        ("NVIDIA L4", "gpu", "L4"),
        ("Tesla T4", "gpu", "T4"),
        ("AMD Instinct MI300X", "rocm", "MI300X"),
        ("TPU v5 lite", "tpu", "TPU v5 lite"),
        ("TPU v5p", "tpu", "TPU v5"),
        ("TPU v6 lite", "tpu", "TPU v6"),
        ("a card of next year", "gpu", "H100"),
        ("a chip of next year", "tpu", "TPU v5 lite"),
        ("cpu", "cpu", None),
        ("H100", "a platform of its own", None),
    ],
)
def test_the_device_of_the_mesh(kind, platform, found):
    with at(kind, platform):
        device = planned_for()
    assert found == (None if device is None else device.kind)


@pytest.mark.parametrize("default", [None, "cpu", "a device"])
def test_a_cpu_by_default(default):
    default = jax.local_devices(backend="cpu")[0] if default == "a device" else default
    with jax.default_device(default) if default else contextlib.nullcontext():
        assert planned_for() is None or jax.default_backend() != "cpu"


def predicted(device, f, *types):
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    return nanoseconds(jax.make_jaxpr(f)(*types), device)


def product(dtype):
    return predicted(H100, jnp.matmul, ((8192, 8192), dtype), ((8192, 8192), dtype))


def test_products_of_large_matrices_take_what_arithmetic_takes():
    least = 2 * 8192**3 / H100.flops
    assert least < product("bfloat16") < 1.01 * least
    for dtype, times in {"float32": 2, "float64": 16, "complex64": 8, "int8": 0.5}.items():
        assert product(dtype) == pytest.approx(times * product("bfloat16"), rel=0.01)
    exact = lambda x, y: jnp.matmul(x, y, precision="highest")
    numbers = ((8192, 8192), "float32")
    for device, times in ((H100, 6), (V5E, 6), (T4, 2)):
        slow, fast = (predicted(device, f, numbers, numbers) for f in (exact, jnp.matmul))
        assert slow == pytest.approx(times * fast, rel=0.01)
    tpu = [
        predicted(V5E, jnp.matmul, ((8192, 8192), t), ((8192, 8192), t))
        for t in ("bfloat16", "float32")
    ]
    assert tpu[0] == pytest.approx(tpu[1], rel=0.01)


def test_products_of_thin_matrices_take_what_their_bytes_take():
    found = predicted(H100, jnp.matmul, ((8192, 8192), "float32"), ((8192,), "float32"))
    moved = 4 * 8192**2 / H100.bandwidth
    assert moved < found < 1.01 * moved + H100.launch


def image(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_a_convolution_is_a_product():
    found = predicted(H100, image, ((64, 64, 64, 256), "bfloat16"), ((3, 3, 256, 128), "bfloat16"))
    operations = 2 * 64**3 * 128 * 9 * 256 / H100.flops
    assert operations < found < operations + 2 * H100.launch


def test_anything_else_passes_over_its_largest_array():
    numbers = ((1 << 24,), "float32")
    moved = (1 << 26) / H100.bandwidth
    for f in (jnp.exp, jnp.sum, lambda x: jnp.cumsum(x), lax.sort):
        assert predicted(H100, f, numbers) >= moved
    assert predicted(H100, jnp.exp, numbers) < moved + 2 * H100.launch
    assert predicted(H100, lax.sort, numbers) > 10 * moved


def test_slices_take_what_they_copy():
    rows = ((1 << 20, 64), "float32")
    for f in (lambda x: x[3], lambda x: x.at[3].set(1.0), lambda x: x[jnp.arange(5)]):
        assert predicted(H100, f, rows) < 20 * H100.launch


def test_steps_of_an_inner_loop_are_added_up():
    loop = lambda n: lambda x: loopkit.scan(lambda c, _: (jnp.exp(c), None), x, None, n)[0]
    few, many = (predicted(V5E, loop(n), ((1 << 20,), "float32")) for n in (3, 30))
    assert many == pytest.approx(10 * few)


def test_what_leaves_the_device_costs_the_same_on_all():
    back = lambda x: jax.pure_callback(lambda x: x, x, x)
    types = [((100,), "float32")]
    assert predicted(H100, back, *types) == predicted(None, back, *types)


def layers(memory=None):
    """24 layers whose attention scores take many bytes and few operations."""

    def step(h, w):
        scores = jnp.exp(jnp.sin(jnp.einsum("bqd,bkd->bqk", h, h) / 8))
        h = h + jnp.einsum("bqk,bkd->bqd", scores / scores.sum(-1, keepdims=True), h)
        return h / 2 + jnp.tanh(h @ w) @ w.T, None

    def loss(h, ws):
        how = {} if memory is None else {"memory": memory}
        return jnp.sum(loopkit.scan(step, h, ws, **how)[0] ** 2)

    return loss


def arguments(dtype="float64"):
    rng = np.random.default_rng(0)
    some = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, dtype)
    return some(2, 64, 8), some(24, 8, 32)


def test_plans_differ_from_device_to_device_and_nothing_is_stale():
    loss, given = layers(3_000_000), arguments()
    shown = lambda: str(loopkit.explain(loss, *given))
    on_cpu = shown()
    with at("NVIDIA H100 80GB HBM3", "gpu"):
        on_gpu = shown()
    with at("TPU v5 lite", "tpu"):
        on_tpu = shown()
    assert "times of H100" in on_gpu
    assert "times of TPU v5 lite" in on_tpu
    assert "times of" not in on_cpu
    assert shown() == on_cpu
    times = [text.split("to keep of a step")[1] for text in (on_cpu, on_gpu, on_tpu)]
    kept = [re.findall(r"\[(.*?) and ", text) for text in times]
    assert kept[0] != kept[1], "an H100 keeps something else of a step"


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 3_000_000, 6_000_000, "8 MB"])
@pytest.mark.parametrize("kind", [("NVIDIA H100 80GB HBM3", "gpu"), ("TPU v5 lite", "tpu")])
def test_the_device_changes_no_number(memory, kind):
    given = arguments()
    expected = jax.grad(layers(), (0, 1))(*given)
    with at(*kind):
        found = jax.jit(jax.grad(layers(memory), (0, 1)))(*given)
        second = jax.jit(jax.jvp, static_argnums=0)(jax.grad(layers(memory)), given, given)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(second[0], expected[0], rtol=1e-10, atol=1e-12)
    first = jax.jvp(jax.grad(layers()), given, given)[1]
    np.testing.assert_allclose(second[1], first, rtol=1e-9, atol=1e-11)


def test_an_accelerator_keeps_all_of_a_loop_of_small_steps():
    """To launch its steps once more would take as long as the steps."""

    def plan(steps):
        loss = lambda x: loopkit.scan(lambda x, _: (jnp.tanh(x), None), x, None, steps)[0].sum()
        return loopkit.explain(loss, jnp.ones(128)).plan

    with at("NVIDIA H100 80GB HBM3", "gpu"):
        assert plan(2000).keeps_all
        assert plan(5000).strategy == "every segment"
    assert plan(2000).strategy == "every segment"


@pytest.mark.slow
def test_one_program_for_several_platforms():
    given = arguments()
    with at("NVIDIA H100 80GB HBM3", "gpu"):
        function = jax.jit(jax.grad(layers(3_000_000)))
        exported = jax.export.export(function, platforms=("cpu", "cuda", "tpu"))(*given)
    expected = jax.grad(layers())(*given)
    np.testing.assert_allclose(exported.call(*given), expected, rtol=1e-10, atol=1e-12)


def test_a_step_traced_for_a_cpu_is_faster_on_a_gpu():
    """A GPU chooses between waits and steps where the program is lowered for it."""
    step = StepCosts(8, 8, run=3e6)
    assert step.on_gpu == 1e5
    assert step._replace(device=H100).on_gpu == 3e6
