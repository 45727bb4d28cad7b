"""The paper's two models, as an end-to-end experiment sees them: times and sizes (section 5.2).

Only what matters to a pipeline is kept: how long a stage computes on a micro-batch, and how many
bytes go between stages. The paper prints neither; they are worked out here from the models' shapes
and a sustained rate of a V100, which is an assumption that ``flops_per_s`` states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xmesh.mesh import DeviceMesh
from xmesh.pipeline import Edge

#: Bytes per second of a host's NIC in the paper's cluster.
PAPER_NIC_BPS = 10e9 / 8
RANKS_PER_HOST = 4


@dataclass(frozen=True)
class Tensor:
    """What crosses from one stage to another with every micro-batch.

    Attributes:
        name: of its edge.
        src_stage: where it comes from.
        dst_stage: where it goes.
        nbytes: bytes of the activation of a micro-batch, held once.
    """

    name: str
    src_stage: int
    dst_stage: int
    nbytes: float


@dataclass(frozen=True)
class Model:
    """A model cut into stages.

    Attributes:
        name: with its parallel configuration.
        meshes: shape of each stage's mesh, (data, operator) parallel.
        first_ranks: of each stage's mesh; hosts have ``RANKS_PER_HOST``.
        tensors: between stages; cut over the data-parallel axis, replicated over the other.
        forward_s: seconds of a stage's forward on a micro-batch; the backward takes twice as long,
            half of it for the weights.
        num_microbatches: of a step.
        flops_per_s: assumed of one V100.
    """

    name: str
    meshes: tuple[tuple[int, int], ...]
    first_ranks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    forward_s: float
    num_microbatches: int
    flops_per_s: float

    def stage_meshes(self) -> list[DeviceMesh]:
        """Meshes of consecutive ranks."""
        return [
            DeviceMesh.arange(shape, first, axis_names=("dp", "op"))
            for shape, first in zip(self.meshes, self.first_ranks, strict=True)
        ]

    def edges(self, scale: float) -> list[Edge]:
        """Edges of bytes, whose sizes are multiplied; 0 makes them one byte for each part."""
        parts = max(shape[0] for shape in self.meshes)
        return [
            Edge(
                tensor.name,
                tensor.src_stage,
                tensor.dst_stage,
                src="S{dp} R",
                dst="S{dp} R",
                shape=(parts, max(1, round(tensor.nbytes * scale / parts))),
                dtype="uint8",
            )
            for tensor in self.tensors
        ]


def gpt(
    name: str, hidden: int, layers: int, dp: int, op: int, pp: int, microbatch: int = 16
) -> Model:
    """GPT with sequences of 1024 tokens, in half precision.

    A layer's forward takes 24 s h^2 (1 + s / 6h) operations for a sequence of s tokens of width h.
    """
    sequence, flops_per_s = 1024, 40e12
    flops = microbatch * layers / pp * 24 * sequence * hidden**2 * (1 + sequence / (6 * hidden))
    nbytes = microbatch * sequence * hidden * 2
    return Model(
        f"{name} ({dp},{op},{pp})",
        ((dp, op),) * pp,
        tuple(dp * op * stage for stage in range(pp)),
        tuple(Tensor(f"hidden{i}", i, i + 1, nbytes) for i in range(pp - 1)),
        flops / (dp * op * flops_per_s),
        num_microbatches=16,
        flops_per_s=flops_per_s,
    )


def u_transformer(name: str, channels: int, op: int) -> Model:
    """U-Transformer on images of 32 x 32, 64 of them in a micro-batch, in half precision.

    The rate decides how much there is to hide: see docs/performance.md.

    Four blocks go down and four up; each halves the image and doubles the channels, and has the
    work of three 3 x 3 convolutions. The output of each block down goes to its partner up.
    """
    images, flops_per_s = 64, 30e12
    sides = (32, 16, 8, 4)
    flops = 0.0
    tensors = []
    for level, side in enumerate(sides):
        width = channels * 2**level
        flops += 3 * 2 * 9 * width**2 * side**2 * images
        tensors.append(Tensor(f"skip{level}", 0, 1, images * side**2 * width * 2))
    return Model(
        f"{name} 2 x (1,{op})",
        ((1, op), (1, op)),
        (0, RANKS_PER_HOST),
        tuple(tensors),
        flops / (op * flops_per_s),
        num_microbatches=32,
        flops_per_s=flops_per_s,
    )


MODELS = (
    gpt("GPT-2.6B", 2560, 32, 2, 2, 2),
    gpt("GPT-2.6B", 2560, 32, 2, 1, 4),
    u_transformer("U-Transformer-1B", 480, 2),
    u_transformer("U-Transformer-2B", 672, 4),
)


def num_ranks(models: Iterable[Model]) -> int:
    """Ranks that the largest of some models needs."""
    return max(1 + rank for model in models for mesh in model.stage_meshes() for rank in mesh.ranks)
