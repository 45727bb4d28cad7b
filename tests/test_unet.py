"""The U-Net of the examples, in one process: gradients, data, checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from unet import checkpoint
from unet.alone import Alone
from unet.data import NOISE, draw
from unet.layers import Later, Layers
from unet.model import Network, Part, loss_of
from unet.settings import Settings

SMALL = Settings(Network(side=8, width=4, layers=4, heads=2), images=3, dtype="float64")


def along(function, array, direction, h=1e-6):
    """Slope of a function at an array, by central differences."""
    return (function(array + h * direction) - function(array - h * direction)) / (2 * h)


LAYERS = {
    "linear": (lambda ops: ops.linear("w"), (2, 3, 3, 5), (5, 4)),
    "linear to heads": (lambda ops: ops.linear("w"), (2, 3, 3, 5), (5, 3, 2, 4)),
    "linear from heads": (lambda ops: ops.linear("w", axes=2), (2, 3, 3, 2, 4), (2, 4, 5)),
    "conv": (lambda ops: ops.conv("w"), (2, 4, 3, 5), (3, 3, 5, 4)),
    "norm": (lambda ops: ops.norm("w"), (2, 3, 3, 5), (5,)),
    "silu": (lambda ops: ops.silu, (2, 3, 3, 5), None),
    "attend": (lambda ops: ops.attend, (2, 2, 3, 3, 2, 4), None),
    "halve": (lambda ops: ops.halve, (2, 4, 6, 5), None),
    "double": (lambda ops: ops.double, (2, 2, 3, 8), None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layer(name):
    make, shape, weight_shape = LAYERS[name]
    random = np.random.default_rng(3)
    x = random.standard_normal(shape)
    weights = {} if weight_shape is None else {"w": random.standard_normal(weight_shape)}

    def run(x, weights):
        return make(Layers(np, weights, lambda array: array))(x)

    y, pull = run(x, weights)
    g = random.standard_normal(y.shape)
    later: Later = {}
    g_x = pull(g, later)
    assert g_x.shape == x.shape
    assert later.keys() == weights.keys()  # nothing of weights is computed before it is asked for
    direction = random.standard_normal(shape)
    slope = along(lambda x: (run(x, weights)[0] * g).sum(), x, direction)
    assert (g_x * direction).sum() == pytest.approx(slope, rel=1e-6)
    for key, weight in weights.items():
        direction = random.standard_normal(weight.shape)
        slope = along(lambda w, key=key: (run(x, {key: w})[0] * g).sum(), weight, direction)
        gradient = later[key]()
        assert gradient.shape == weight.shape
        assert (gradient * direction).sum() == pytest.approx(slope, rel=1e-6)


def test_gradients_of_the_whole_network():
    network = SMALL.network
    random = np.random.default_rng(5)
    weights = {name: network.initial(name, 0) for name in network.weights()}
    images = SMALL.draw(0, range(3))

    def loss(weights, noisy):
        outputs, pull = Part(network, range(4), weights).forward({"x0": noisy})
        value, gradient = loss_of(outputs["x4"], images.noise, 3)
        return value, pull, gradient

    _, pull, gradient = loss(weights, images.noisy)
    later: Later = {}
    found = pull({"x4": gradient}, later)
    assert found.keys() == {"x0"}
    direction = random.standard_normal(images.noisy.shape)
    slope = along(lambda x: loss(weights, x)[0], images.noisy, direction)
    assert (found["x0"] * direction).sum() == pytest.approx(slope, rel=1e-6)
    assert later.keys() == weights.keys()
    for name, weight in weights.items():
        direction = random.standard_normal(weight.shape)
        slope = along(
            lambda w, name=name: loss({**weights, name: w}, images.noisy)[0], weight, direction
        )
        assert (later[name]() * direction).sum() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_parts_do_what_the_whole_does():
    network = SMALL.network
    weights = {name: network.initial(name, 0) for name in network.weights()}
    noisy = SMALL.draw(0, range(2)).noisy
    whole, _ = Part(network, range(4), weights).forward({"x0": noisy})
    values = {"x0": noisy}
    for layers in (range(0, 1), range(1, 2), range(2, 4)):
        part = Part(network, layers, {name: weights[name] for name in network.weights(layers)})
        names = [name for layer in layers for name in network.values(layer)[0]]
        inputs = {name: values.pop(name) for name in names if name in values}
        outputs, _ = part.forward(inputs)
        for name, array in outputs.items():
            assert array.shape == (2, *network.shape(name))
        values.update(outputs)
    assert values.keys() == {"x4"}
    np.testing.assert_array_equal(values["x4"], whole["x4"])


def test_a_rank_without_images_computes_nothing():
    network = SMALL.network
    weights = {name: network.initial(name, 0) for name in network.weights()}
    images = SMALL.draw(0, range(0))
    outputs, pull = Part(network, range(4), weights).forward({"x0": images.noisy})
    loss, gradient = loss_of(outputs["x4"], images.noise, 3)
    later: Later = {}
    pull({"x4": gradient}, later)
    assert loss == 0
    assert all(not compute().any() for compute in later.values())


def test_an_image_depends_on_seed_step_and_number_alone():
    some = draw(1, 2, range(3, 6), 8, "float64")
    more = draw(1, 2, range(0, 8), 8, "float64")
    np.testing.assert_array_equal(some.noisy, more.noisy[3:6])
    np.testing.assert_array_equal(some.noise, more.noise[3:6])
    for other in ((2, 2, range(3, 6)), (1, 3, range(3, 6)), (1, 2, range(4, 7))):
        assert not np.array_equal(draw(*other, 8, "float64").noisy, some.noisy)
    clean = more.noisy - NOISE * more.noise
    assert clean.min() > -1e-12
    assert clean.max() < 1 + 1e-12
    assert all(image.max() > 0.3 for image in clean)
    assert draw(1, 2, range(3), 8, "float32").noisy.dtype == np.float32


def test_the_loss_falls():
    training = Alone(SMALL)
    losses = [training.step(step) for step in range(30)]
    assert losses[0] == pytest.approx(1, abs=0.3)
    assert losses[-1] < 0.7


def test_a_checkpoint_brings_back_the_same_losses(tmp_path):
    straight = Alone(SMALL)
    losses = [straight.step(step) for step in range(6)]
    begun = Alone(SMALL)
    for step in range(3):
        begun.step(step)
    for steps in (2, 3):  # the last one counts
        checkpoint.save(tmp_path / "deep" / "run", steps, begun.state())
    (tmp_path / "deep" / "run" / "step-000009.part").touch()  # from a program that was ended
    resumed = Alone(SMALL)
    steps, state = checkpoint.load(tmp_path / "deep" / "run", SMALL.network)
    resumed.restore(state)
    assert steps == 3
    assert [resumed.step(step) for step in range(3, 6)] == losses[3:]


def test_no_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="no checkpoint"):
            checkpoint.load(folder, SMALL.network)


def test_a_checkpoint_of_another_network(tmp_path):
    checkpoint.save(tmp_path, 1, Alone(SMALL).state())
    for other in (Network(8, 8, 4, 2), Network(8, 4, 2, 2)):
        with pytest.raises(ValueError, match=r"step-000001.npz is of another network than"):
            checkpoint.load(tmp_path, other)


@pytest.mark.parametrize("numbers", [(8, 4, 3, 2), (6, 4, 4, 2), (8, 5, 4, 2), (8, 0, 4, 2)])
def test_networks_that_cannot_be(numbers):
    with pytest.raises(ValueError, match=r"must be even|at least 1"):
        Network(*numbers)
