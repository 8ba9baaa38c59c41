"""The estimate whether BPipe pays for a model, its hardware and its memory.

from pipeline import estimation

profiles = [estimation.Profile(microbatch=1, forward=1.0, backward=2.0, stash_bytes=1e9), ...]
print(estimation.estimate(profiles, batch=128, num_stages=8,
                          ranks=estimation.Ranks(memory_bytes=16e9)))
"""

from pipeline.estimation.estimator import Candidate, Estimate, Profile, Ranks, estimate
from pipeline.estimation.formula import mfu, speedup_bound, stage_mfu, step_seconds
from pipeline.estimation.transformer import (
    MODELS,
    Cluster,
    Transformer,
    transformer_profiles,
    transformer_ranks,
)

__all__ = [
    "MODELS",
    "Candidate",
    "Cluster",
    "Estimate",
    "Profile",
    "Ranks",
    "Transformer",
    "estimate",
    "mfu",
    "speedup_bound",
    "stage_mfu",
    "step_seconds",
    "transformer_profiles",
    "transformer_ranks",
]
