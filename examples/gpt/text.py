"""Training text that every machine has: the source of Python's standard library, by characters."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Each is one file in every Python from 3.10 on.
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "dataclasses",
    "difflib",
    "fractions",
    "ftplib",
    "mailbox",
    "optparse",
    "pickletools",
    "pydoc",
    "random",
    "shutil",
    "statistics",
    "subprocess",
    "tarfile",
    "turtle",
    "typing",
)
#: A line's end, and all of ASCII that prints; whatever else there is becomes the last, "~".
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(CHARACTERS)


def encode(text: str) -> NDArray[np.uint8]:
    """Tokens of a text, one for each byte."""
    table = np.full(256, VOCABULARY - 1, np.uint8)
    for token, character in enumerate(CHARACTERS):
        table[ord(character)] = token
    tokens: NDArray[np.uint8] = table[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    return tokens


def decode(tokens: NDArray[Any]) -> str:
    """Text of some tokens."""
    return "".join(CHARACTERS[token] for token in tokens)


def standard_library() -> str:
    """Source of ``MODULES``, one after the other; those that this Python lacks are left out."""
    sources = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        source = getattr(spec and spec.loader, "get_source", lambda _: None)(name)
        sources.append(source or "")
    return "".join(sources)


class Text:
    """Batches of a text, each row of which depends on seed, step and its index alone.

    So any rank makes its own rows, however a batch is cut into micro-batches and over ranks, and a
    run that is resumed goes on with the rows that come next.

    Args:
        text: at least ``sequence + 1`` characters.
        sequence: tokens of a row.
        seed: another one gives other rows.
    """

    def __init__(self, text: str, sequence: int, seed: int) -> None:
        self._tokens = encode(text)
        self._sequence = sequence
        self._seed = seed

    def rows(self, step: int, first: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Some rows of the batch of a step.

        Args:
            step: which step.
            first: index of the first row in the whole batch.
            stop: index after the last.

        Returns:
            Tokens, and those that follow each of them: int64 of shape (stop - first, sequence).
        """
        length = self._sequence + 1
        found = np.empty((stop - first, length), np.int64)
        for place, row in enumerate(range(first, stop)):
            rng = np.random.default_rng([self._seed, step, row])
            start = int(rng.integers(len(self._tokens) - length + 1))
            found[place] = self._tokens[start : start + length]
        return found[:, :-1], found[:, 1:]
