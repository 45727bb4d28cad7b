"""examples/gpt on CuPy does what it does on NumPy.

The double of CuPy has no arithmetic to speak of: there arrays of NumPy stand in that refuse what
CuPy's refuse.
"""

from __future__ import annotations

import numpy as np
import pytest
import strict_arrays
from gpt.adam import Adam
from gpt.model import Config, Stage, initial, parameters
from on_device import ON_DOUBLE

CONFIG = Config(vocabulary=97, sequence=16, hidden=32, heads=4, layers=2, dtype="float64")
STEPS = 5


@pytest.fixture
def library(monkeypatch):
    """The CuPy to compute with: its functions to get arrays there and back."""
    if ON_DOUBLE:
        strict_arrays.install(monkeypatch)
    import cupy

    return cupy.asarray, cupy.asnumpy


def train(to, back):
    """Losses and gradients of some steps, as NumPy's, computed where ``to`` puts arrays."""
    names = parameters(CONFIG, 0, 1)
    stage = Stage(CONFIG, 0, 1, {name: to(initial(CONFIG, name)) for name in names})
    adam = Adam(stage.values, 1e-2)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        rows = rng.integers(CONFIG.vocabulary, size=(4, CONFIG.sequence + 1))
        _, loss, saved = stage.forward(None, to(rows[:, :-1]), to(rows[:, 1:]))
        gradients = stage.backward_weight(stage.backward_input(None, saved)[1])
        adam.update(stage.values, gradients)
        yield float(back(loss)), {name: back(gradient) for name, gradient in gradients.items()}


def test_losses_and_gradients_equal_numpys(library):
    to, back = library
    for (loss, gradients), (wanted, others) in zip(
        train(to, back), train(np.asarray, np.asarray), strict=True
    ):
        assert abs(loss - wanted) <= 1e-10 * abs(wanted)
        assert set(gradients) == set(others)
        for name, gradient in gradients.items():
            largest = np.abs(others[name]).max()
            np.testing.assert_allclose(gradient, others[name], rtol=0, atol=1e-9 * largest)
