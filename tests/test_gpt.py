"""examples/gpt in one process: gradients, text, a model that is cut into stages, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import strict_arrays
from gpt import layers
from gpt.adam import Adam
from gpt.model import Config, Stage, initial, parameters
from gpt.reference import Reference
from gpt.text import CHARACTERS, MODULES, VOCABULARY, Text, decode, encode, standard_library

SMALL = Config(vocabulary=11, sequence=5, hidden=8, heads=2, layers=2, dtype="float64")


def slope(function: Callable[[], float], array: Any, direction: Any, step: float = 1e-4) -> float:
    """Derivative of a function along a direction of an array that it reads, to fourth order."""
    there = array.copy()
    total = 0.0
    for places, weight in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        array[...] = there + places * step * direction
        total += weight * function()
    array[...] = there
    return total / (12 * step)


def agree(function: Callable[[], float], array: Any, gradient: Any, rng: Any) -> None:
    for _ in range(3):
        direction = rng.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        wanted = slope(function, array, direction)
        np.testing.assert_allclose((gradient * direction).sum(), wanted, rtol=1e-8, atol=1e-10)


def test_layer_norm_gradients():
    rng = np.random.default_rng(1)
    x, gain, bias, out = (
        rng.standard_normal(shape) for shape in [(2, 3, 6), (6,), (6,), (2, 3, 6)]
    )
    _, saved = layers.layer_norm(x, gain, bias)

    def loss() -> float:
        return float((layers.layer_norm(x, gain, bias)[0] * out).sum())

    agree(loss, x, layers.layer_norm_input(out, gain, saved), rng)
    for array, gradient in zip((gain, bias), layers.layer_norm_weight(saved.x, out), strict=True):
        agree(loss, array, gradient, rng)


def test_attention_and_gelu_gradients():
    rng = np.random.default_rng(2)
    qkv, out = rng.standard_normal((2, 5, 18)), rng.standard_normal((2, 5, 6))
    _, saved = layers.attention(qkv, 3)
    agree(
        lambda: float((layers.attention(qkv, 3)[0] * out).sum()),
        qkv,
        layers.attention_input(out, saved),
        rng,
    )
    agree(
        lambda: float((layers.gelu(qkv)[0] * qkv).sum()),
        qkv,
        layers.gelu_input(qkv, layers.gelu(qkv)[1]) + layers.gelu(qkv)[0],
        rng,
    )


def test_attention_looks_back_alone():
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((1, 5, 12))
    before = layers.attention(qkv, 2)[0]
    qkv[:, 3] += 1
    after = layers.attention(qkv, 2)[0]
    assert (before[:, :3] == after[:, :3]).all()
    assert (before[:, 3:] != after[:, 3:]).all()


def test_cross_entropy_and_its_gradient():
    rng = np.random.default_rng(4)
    logits, targets = rng.standard_normal((2, 3, 7)), rng.integers(7, size=(2, 3))
    loss, gradient = layers.cross_entropy(logits, targets)
    agree(lambda: float(layers.cross_entropy(logits, targets)[0]), logits, gradient, rng)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = -np.log(np.take_along_axis(shares, targets[..., None], -1)).sum()
    np.testing.assert_allclose(loss, wanted)
    shifted = layers.cross_entropy(logits + 1e4, targets)[0]
    np.testing.assert_allclose(shifted, loss)  # and no overflow


def whole(config: Config) -> Stage:
    rng = np.random.default_rng(config.seed)
    values = {name: initial(config, name) for name in parameters(config, 0, 1)}
    for value in values.values():  # no gain of 1 nor bias of 0: they would hide faults
        value += 0.1 * rng.standard_normal(value.shape)
    return Stage(config, 0, 1, values)


@pytest.mark.parametrize("tied", [True, False])
def test_every_gradient_of_the_model(tied):
    config = replace(SMALL, tied=tied)
    rng = np.random.default_rng(5)
    stage = whole(config)
    tokens, targets = rng.integers(11, size=(2, 3, 5))

    def loss() -> float:
        return float(np.asarray(stage.forward(None, tokens, targets)[1]))

    nothing, owed = stage.backward_input(None, stage.forward(None, tokens, targets)[2])
    assert nothing is None
    gradients = stage.backward_weight(owed)
    assert set(gradients) == set(stage.values)
    for name, value in stage.values.items():
        assert gradients[name].shape == value.shape == parameters(config, 0, 1)[name].shape
        agree(loss, value, gradients[name], rng)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_one_after_the_other_equal_the_whole(count, tied):
    config = replace(SMALL, tied=tied)
    rng = np.random.default_rng(6)
    one = whole(config)
    stages = [
        Stage(config, i, count, {name: one.values[name] for name in parameters(config, i, count)})
        for i in range(count)
    ]
    tokens, targets = rng.integers(11, size=(2, 3, 5))
    _, wanted_loss, saved = one.forward(None, tokens, targets)
    wanted = one.backward_weight(one.backward_input(None, saved)[1])
    x, loss, kept = None, None, []
    for stage in stages:
        x, loss, saved = stage.forward(x, tokens, targets)
        kept.append(saved)
    assert loss == wanted_loss
    gradient = None
    found: dict[str, Any] = {}
    for stage, saved in zip(reversed(stages), reversed(kept), strict=True):
        gradient, owed = stage.backward_input(gradient, saved)
        for name, value in stage.backward_weight(owed).items():
            found[name] = found.get(name, 0) + value  # what tying does
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12)


def test_the_first_parameters_follow_from_seed_and_name():
    assert (initial(SMALL, "block1.mlp.up.weight") == initial(SMALL, "block1.mlp.up.weight")).all()
    other = replace(SMALL, seed=1)
    assert (initial(SMALL, "final.gain") == 1).all()
    assert (initial(SMALL, "block0.mlp.up.bias") == 0).all()
    for name in ("block0.mlp.up.weight", "embedding.tokens"):
        assert (initial(SMALL, name) != initial(other, name)).all()
    single = replace(SMALL, dtype="float32")
    assert {initial(single, name).dtype for name in parameters(single, 0, 1)} == {
        np.dtype("float32")
    }


def test_float32_stays_float32():
    config = replace(SMALL, dtype="float32")
    stage = Stage(config, 0, 1, {name: initial(config, name) for name in parameters(config, 0, 1)})
    tokens, targets = np.random.default_rng(7).integers(11, size=(2, 3, 5))
    _, loss, saved = stage.forward(None, tokens, targets)
    gradients = stage.backward_weight(stage.backward_input(None, saved)[1])
    adam = Adam(stage.values, 1e-3)
    adam.update(stage.values, gradients)
    for arrays in (gradients, stage.values, adam.means, adam.squares):
        assert {array.dtype for array in arrays.values()} == {np.dtype("float32")}
    assert np.asarray(loss).dtype == "float32"


def test_arrays_of_a_device_stay_there(monkeypatch):
    """With arrays that refuse NumPy's functions, as CuPy's do, all is the same."""
    strict_arrays.install(monkeypatch)
    one, other = whole(SMALL), whole(SMALL)
    other.values = {name: strict_arrays.device(value) for name, value in other.values.items()}
    tokens, targets = np.random.default_rng(8).integers(11, size=(2, 3, 5))
    losses = []
    for stage, move in ((one, np.asarray), (other, strict_arrays.device)):
        adam, gradients = Adam(stage.values, 1e-2), {}
        for _ in range(2):
            _, loss, saved = stage.forward(None, move(tokens), move(targets))
            gradients = stage.backward_weight(stage.backward_input(None, saved)[1])
            adam.update(stage.values, gradients)
            losses.append(float(np.asarray(loss)))
        kinds = {type(array) for kept in (gradients, adam.means) for array in kept.values()}
        assert kinds == {type(move(tokens))}
    assert losses[:2] == losses[2:]
    for name, value in one.values.items():
        assert (np.asarray(other.values[name]) == value).all()
    with pytest.raises(TypeError, match="exp was given"):
        np.exp(strict_arrays.device(tokens))
    with pytest.raises(TypeError, match="met one of the device"):
        strict_arrays.device(tokens) + tokens


def test_adam_takes_steps_of_its_rate_and_forgets():
    values = {"a": np.array([1.0, -2.0]), "b": np.zeros(3)}
    adam = Adam(values, rate=0.1)
    adam.update(values, {"a": np.array([5.0, -1e-3]), "b": np.full(3, 1e-20)})
    np.testing.assert_allclose(values["a"], [0.9, -1.9], rtol=1e-4)  # whatever the gradient's size
    np.testing.assert_allclose(values["b"], 0, atol=1e-10)  # but not if it is rounding alone
    for _ in range(400):
        adam.update(values, {"a": values["a"] - 3, "b": values["b"]})
    np.testing.assert_allclose(values["a"], 3, atol=1e-2)


def test_text_is_the_standard_library():
    text = standard_library()
    assert len(text) > 500_000
    assert "class ArgumentParser" in text
    assert len(set(MODULES)) == len(MODULES)
    line = "def f(x):\n    return {x: ~x}\n"
    assert decode(encode(line)) == line
    assert decode(encode("\u00e4\t\u4e2d")) == "~~?"
    assert encode(CHARACTERS).tolist() == list(range(len(CHARACTERS)))


def test_rows_depend_on_step_and_index_alone():
    source = "".join(map(chr, range(32, 127))) * 3
    text = Text(source, sequence=8, seed=3)
    tokens, targets = text.rows(5, 0, 6)
    assert tokens.shape == targets.shape == (6, 8)
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    part = Text(source, sequence=8, seed=3).rows(5, 2, 5)
    assert (part[0] == tokens[2:5]).all()
    assert (part[1] == targets[2:5]).all()
    for other in (Text(source, 8, 4).rows(5, 0, 6), text.rows(6, 0, 6), text.rows(5, 6, 12)):
        assert (other[0] != tokens).any()
    assert text.rows(0, 3, 3)[0].shape == (0, 8)
    assert decode(Text("0123456789", 9, 0).rows(1, 0, 1)[1][0]) == "123456789"


def test_the_reference_learns():
    text = Text("abcabd" * 50, sequence=12, seed=0)
    config = Config(sequence=12, hidden=16, heads=2, layers=1)
    reference = Reference(config, text, rows=8, rate=1e-2)
    losses = [reference.step(step)[0] for step in range(30)]
    assert abs(losses[0] - np.log(config.vocabulary)) < 0.3
    assert losses[-1] < 1.0


def test_a_checkpoint_is_of_one_model_and_whole(tmp_path):
    from gpt import checkpoint
    from gpt.parallel import Grid
    from gpt.trainer import Trainer
    from mpi4py import MPI

    from xmesh import World

    config = replace(SMALL, vocabulary=VOCABULARY)
    text, grid = Text("abcabd" * 50, SMALL.sequence, seed=0), Grid(rows=4, microbatches=2)
    with World(MPI.COMM_SELF) as world:
        with Trainer(config, grid, text, world, 1e-2) as trainer:
            with pytest.raises(checkpoint.CheckpointError, match=r"latest\.json"):
                checkpoint.load(tmp_path, trainer)
            trainer.step(0)
            checkpoint.save(tmp_path, 1, trainer)
            wanted = {name: value.copy() for name, value in trainer.shard.stages[0].values.items()}
            after = trainer.step(1)
        with Trainer(config, grid, text, world, 1e-2) as trainer:
            assert checkpoint.load(tmp_path, trainer) == 1
            for name, value in trainer.shard.stages[0].values.items():
                assert (value == wanted[name]).all()
            assert trainer.step(1) == after
        other = replace(config, layers=1, seed=4)
        with (
            Trainer(other, grid, text, world, 1e-2) as trainer,
            pytest.raises(checkpoint.CheckpointError, match="of another model: layers=2, seed=0"),
        ):
            checkpoint.load(tmp_path, trainer)
        (file,) = tmp_path.glob("step000001/*.npz")
        with np.load(file) as arrays:
            kept = {key: arrays[key] for key in arrays.files if "block1.mlp.up.bias" not in key}
        np.savez(file, **kept)
        with (
            Trainer(config, grid, text, world, 1e-2) as trainer,
            pytest.raises(checkpoint.CheckpointError, match=r"no block1\.mlp\.up\.bias"),
        ):
            checkpoint.load(tmp_path, trainer)
