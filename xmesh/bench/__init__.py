"""Experiments: each module with a ``main`` is one that ``xmesh bench`` can run."""
