"""Transformers by formula: parameters, FLOPs, bytes of activations, memory of a stage.

Activations are those of Korthikanti et al. (Reducing Activation Recomputation in Large Transformer
Models, MLSys 2023), for 16-bit numbers, with tensor parallelism over t devices, with or without
sequence parallelism; FLOPs those of Narayanan et al. (SC 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.estimation.estimator import Profile, Ranks
from pipeline.simulation.costs import positive

# Bytes for each parameter under mixed precision and Adam: 16-bit weights, 32-bit gradients, master
# weights and two slots.
ADAM_BYTES = 2 + 4 + 4 + 8
NONE, SELECTIVE, FULL = RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder.

    Attributes:
        layers: number of blocks, L.
        hidden: width, h.
        heads: attention heads, a.
        sequence: tokens in a sample, s.
        vocabulary: number of tokens known.
        feed_forward: width inside the feed-forward part; 4h by default.
        gated: whether the feed-forward part has a gate, and so three matrices (SwiGLU, LLaMA).
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200
    feed_forward: int | None = None
    gated: bool = False

    @property
    def layer_parameters(self) -> int:
        """The number of weights in a block's matrices."""
        inner = self.feed_forward or 4 * self.hidden
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * inner

    @property
    def parameters(self) -> int:
        """The number of weights of the model, embedding included."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    @property
    def sample_flops(self) -> float:
        """FLOPs of forward and backward for one sample, without recomputation."""
        matrices = 6 * self.sequence * self.parameters
        attention = 12 * self.layers * self.hidden * self.sequence**2
        return matrices + attention

    def recomputed_share(self, recompute: str) -> float:
        """The FLOPs that recomputation adds, as a share of those of forward and backward."""
        if recompute == NONE:
            return 0.0
        if recompute == FULL:
            return 1 / 3
        attention = 4 * self.layers * self.hidden * self.sequence**2
        return attention / self.sample_flops

    def layer_stash_bytes(
        self,
        microbatch: int,
        recompute: str = NONE,
        tensor_parallel: int = 1,
        flash: bool = False,
        sequence_parallel: bool = True,
    ) -> float:
        """Bytes that one block keeps for its backward on each device.

        Args:
            microbatch: samples in a micro-batch, b.
            recompute: `none`, `selective` (the attention's core) or `full` (only inputs are kept).
            tensor_parallel: devices that share a block, t.
            flash: whether flash attention is used, which never keeps the attention matrix.
            sequence_parallel: whether the parts between the matrices are shared, too. Without, each
                device keeps all of the 10·s·b·h bytes of inputs, norms and dropout masks.

        Raises:
            ValueError: if `recompute` is none of the three.
        """
        size = self.sequence * microbatch * self.hidden
        if recompute == FULL:
            return 2 * size
        shared = 34.0 if sequence_parallel else 24.0
        each = 34 - shared
        if recompute == SELECTIVE or (recompute == NONE and flash):
            return size * (each + shared / tensor_parallel)
        if recompute == NONE:
            matrix = 5 * self.heads * self.sequence / self.hidden
            return size * (each + (shared + matrix) / tensor_parallel)
        raise ValueError(f"recompute must be one of {RECOMPUTATIONS}, not {recompute!r}")


@dataclass(frozen=True)
class Cluster:
    """The devices that one replica of the model has.

    Attributes:
        devices: their number, p·t.
        tensor_parallel: how many share a layer, t.
        peak_flops: FLOP per second of one device.
        memory_bytes: bytes of one device.
        usable: the share of the memory that is left for the model; the rest goes to the runtime,
            communication buffers and fragmentation.
        pair_bandwidth: bytes per second between the partners of a pair.
        sequence_parallel: see `Transformer.layer_stash_bytes`.
    """

    devices: int
    tensor_parallel: int
    peak_flops: float = 312e12
    memory_bytes: float = 80e9
    usable: float = 0.95
    pair_bandwidth: float = 300e9
    sequence_parallel: bool = True

    def __post_init__(self) -> None:
        for name in ("devices", "tensor_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.devices % self.tensor_parallel:
            raise ValueError(
                f"{self.devices} devices cannot be divided into groups of {self.tensor_parallel}, "
                "tensor_parallel"
            )
        for name in ("peak_flops", "memory_bytes", "usable", "pair_bandwidth"):
            positive(name, getattr(self, name))

    @property
    def num_stages(self) -> int:
        """The number of stages p."""
        return self.devices // self.tensor_parallel


def transformer_profiles(
    model: Transformer,
    cluster: Cluster,
    stage_mfu: Mapping[int, float] | Mapping[tuple[int, str], float],
    recomputations: Iterable[str] = RECOMPUTATIONS,
    flash: bool = False,
) -> list[Profile]:
    """Profiles of a transformer's stages, from the efficiency of one stage.

    Args:
        model: the model.
        cluster: the devices.
        stage_mfu: micro-batch size → the share of a device's peak that a stage reaches while it
            computes without recomputation; or (size, recomputation) → the share with it, counting
            the model's FLOPs only.
        recomputations: those to choose from.
        flash: whether flash attention is used.

    Raises:
        ValueError: if there are more stages than layers, or an efficiency is no share.
        TypeError: if an efficiency is no number.
    """
    if cluster.num_stages > model.layers:
        raise ValueError(
            f"{cluster.num_stages} stages are more than the model's {model.layers} layers; use "
            "fewer devices or more tensor parallelism"
        )
    layers = math.ceil(model.layers / cluster.num_stages)
    speed = cluster.tensor_parallel * cluster.peak_flops
    wanted = list(recomputations)
    profiles = []
    for key, reached in stage_mfu.items():
        microbatch, only = key if isinstance(key, tuple) else (key, None)
        if positive(f"efficiency of micro-batch {microbatch}", reached) > 1:
            raise ValueError(
                f"efficiency of micro-batch {microbatch} is a share of the peak, not {reached!r}"
            )
        for recompute in wanted if only is None else [only]:
            flops = microbatch * model.sample_flops / cluster.num_stages
            seconds = flops / (speed * reached)
            extra = seconds * model.recomputed_share(recompute) if only is None else 0.0
            stash = layers * model.layer_stash_bytes(
                microbatch,
                recompute,
                cluster.tensor_parallel,
                flash,
                cluster.sequence_parallel,
            )
            boundary = 2 * model.sequence * microbatch * model.hidden / cluster.tensor_parallel
            profiles.append(
                Profile(
                    microbatch,
                    forward=seconds / 3,
                    backward=seconds * 2 / 3 + extra,
                    stash_bytes=stash,
                    recompute=recompute,
                    weight=seconds / 3,
                    boundary_bytes=boundary,
                )
            )
    return profiles


def transformer_ranks(
    model: Transformer, cluster: Cluster, parameter_bytes: float = ADAM_BYTES
) -> Ranks:
    """What a stage's devices have, and what weights and optimizer take of it.

    Args:
        model: the model.
        cluster: the devices.
        parameter_bytes: bytes for each weight, with its gradient and optimizer slots.
    """
    num_stages = cluster.num_stages
    layers = math.ceil(model.layers / num_stages)
    weights = [layers * model.layer_parameters] * num_stages
    embedding = model.vocabulary * model.hidden
    weights[0] += embedding
    if num_stages > 1:
        weights[-1] += embedding
    return Ranks(
        memory_bytes=cluster.usable * cluster.memory_bytes,
        static_bytes=[parameter_bytes * count / cluster.tensor_parallel for count in weights],
        bandwidth=cluster.pair_bandwidth,
    )


# Models by name, with the shapes that their papers give.
MODELS = {
    "gpt3-96b": Transformer(layers=80, hidden=9984, heads=104),
    "gpt3-134b": Transformer(layers=88, hidden=11264, heads=88),
    "llama-65b": Transformer(
        layers=80, hidden=8192, heads=64, vocabulary=32000, feed_forward=22016, gated=True
    ),
}
