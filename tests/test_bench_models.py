"""The models of the end-to-end experiment: their arithmetic, and the pipelines made of them."""

from __future__ import annotations

import itertools

import pytest

from xmesh.bench.models import MODELS, gpt, num_ranks
from xmesh.pipeline import Pipeline


def test_gpt_by_hand():
    model = gpt("GPT-2.6B", 2560, 32, 2, 2, 2)
    # 16 sequences of 1024 tokens of 2560 half-precision numbers; 16 layers on 4 GPUs.
    assert [tensor.nbytes for tensor in model.tensors] == [16 * 1024 * 2560 * 2]
    flops = 16 * 16 * 24 * 1024 * 2560**2 * (1 + 1024 / (6 * 2560))
    assert model.forward_s == pytest.approx(flops / (4 * model.flops_per_s))
    assert num_ranks([model]) == 8


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_every_model_is_a_pipeline(model, scale):
    pipe = Pipeline(model.stage_meshes(), model.edges(scale), "eager-1f1b", model.num_microbatches)
    assert pipe.ranks[-1] == num_ranks([model]) - 1
    for edge, tensor in zip(pipe.edges, model.tensors, strict=True):
        assert edge.nbytes == pytest.approx(tensor.nbytes * scale, abs=4)
        assert (edge.nbytes or 0) >= 1


def test_skip_connections_shrink_by_half_from_level_to_level():
    (model,) = (model for model in MODELS if model.name.startswith("U-Transformer-1B"))
    sizes = [tensor.nbytes for tensor in model.tensors]
    assert sizes[0] == 64 * 32 * 32 * 480 * 2
    assert all(a == 2 * b for a, b in itertools.pairwise(sizes))
