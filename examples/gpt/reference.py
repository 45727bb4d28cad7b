"""The same model trained in one process by a plain loop, to compare with."""

from __future__ import annotations

import numpy as np

from gpt.adam import Adam
from gpt.model import Arrays, Config, Stage, initial, parameters
from gpt.text import Text


class Reference:
    """One stage, all rows at once, no MPI.

    Args:
        config: sizes of the model.
        text: where rows come from.
        rows: rows of a batch.
        rate: of Adam.
    """

    def __init__(self, config: Config, text: Text, rows: int, rate: float) -> None:
        values = {name: initial(config, name) for name in parameters(config, 0, 1)}
        self.stage = Stage(config, 0, 1, values)
        self._adam = Adam(values, rate)
        self._text = text
        self._rows = rows

    def step(self, step: int) -> tuple[float, Arrays]:
        """Do a step.

        Returns:
            The mean loss of a token, in nats, and the gradients of it that were applied.
        """
        tokens, targets = self._text.rows(step, 0, self._rows)
        _, loss, saved = self.stage.forward(None, tokens, targets)
        _, owed = self.stage.backward_input(None, saved)
        scale = 1 / tokens.size
        gradients = {
            name: gradient * scale for name, gradient in self.stage.backward_weight(owed).items()
        }
        self._adam.update(self.stage.values, gradients)
        return float(np.asarray(loss)) * scale, gradients
