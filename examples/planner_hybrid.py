"""The three cases of Pal et al. (arXiv 1907.13257): when a split model beats more replicas.

    python examples/planner_hybrid.py                # the paper's cases, tables and PNGs
    python examples/planner_hybrid.py --measure      # and E(B) of digits, measured here

Each number below has its source. The abstract gives the gain of the hybrid over data parallelism at
scale; the two-device speed-ups are quoted second hand and not checked against the paper's text. The
paper's curves of E(B) are not quoted anywhere that this example could take them from, so only what
the numbers imply is used: where data parallelism has its last useful doubling, from D to 2 D
devices, the hybrid gains SU_2 over D replicas, and data parallelism SU_2 / (1 + gain). With a
scaling efficiency of 1 that fixes E(2D)/E(D). Devices are counted in units of that D.
"""

import argparse
import pathlib
from dataclasses import dataclass

from pipeline.planning import EpochFit, HybridModel, measure_epochs

ABSTRACT = "abstract of arXiv 1907.13257"
SECOND_HAND = "second hand, not checked against the paper"


@dataclass(frozen=True)
class Case:
    name: str
    two_way_speedup: float  # SU_2
    speedup_source: str
    gain: float  # of the hybrid over data parallelism at scale, "at least"
    gain_source: str
    how: str


CASES = [
    Case("Inception-V3", 1.32, SECOND_HAND, 0.265, ABSTRACT, "placement by DLPlacer"),
    Case("GNMT", 1.15, SECOND_HAND, 0.08, ABSTRACT, "pipelined"),
    Case("BigLSTM", 1.22, SECOND_HAND, 0.22, ABSTRACT, "pipelined"),
]


def model_of(case):
    """The hybrid model that the published numbers imply; devices in units of D."""
    data_parallel_gain = case.two_way_speedup / (1 + case.gain)  # of the doubling from D to 2 D
    epochs = {1.0: 1.0, 2.0: 2 / data_parallel_gain}
    return HybridModel(
        batch=1.0, epochs=epochs, efficiency={1: 1.0}, model_speedup={2: case.two_way_speedup}
    )


def paper(folder):
    for case in CASES:
        model = model_of(case)
        gain = model.speedup(2, 2) / model.speedup(2) - 1
        assert abs(gain - case.gain) < 1e-9  # the model gives back what it was made from
        print(f"{case.name} ({case.how})")
        print(f"  SU_2 = {case.two_way_speedup}: {case.speedup_source}")
        print(f"  hybrid over data parallel at scale, at least {case.gain:.1%}: {case.gain_source}")
        print(
            f"  implied: D to 2 D replicas gain {model.speedup(2):.3f} times, "
            f"E(2D)/E(D) = {model.epochs_of(2) / model.epochs_of(1):.3f}; the hybrid wins on 2 D "
            f"devices if SU_2 > {model.win_threshold(1, 2):.3f}: {model.hybrid_wins(2, 2)}"
        )
        path = folder / f"hybrid-{case.name.lower()}.png"
        model.plot(path, [1, 2], f"{case.name}: devices in units of D ({case.how})")
        print(f"  drawn: {path}")


def measured(folder):
    """E(B) of a small model on scikit-learn's digits, and what it means for 1 to 32 workers."""
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    x, x_val, y, y_val = train_test_split(images, labels, test_size=360, random_state=0)

    def build(batch):
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # The linear scaling rule, up to what still converges.
        model.compile(keras.optimizers.SGD(min(0.05 * batch / 16, 0.5)), loss, metrics=["accuracy"])
        return model

    table = measure_epochs(build, (x, y), (x_val, y_val), [16, 64, 256, 1024], target=0.94)
    fit = EpochFit.of(table.points)
    print("\nE(B) of digits to 94% validation accuracy, measured:")
    for batch, epochs in table.points.items():
        print(f"  B={batch:>5g}  {epochs:6.2f} epochs, fit {fit(batch):6.2f}")
    model = HybridModel(batch=16, epochs=fit, model_speedup={2: 1.3, 4: 1.8, 8: 2.4})
    counts = [1, 2, 4, 8, 16, 32, 64]
    print(model.table(counts))
    print(f"best on at most 64 devices (SU_M assumed): {model.best(64)}")
    model.plot(folder / "hybrid-digits.png", counts, "digits: E(B) measured, SU_M assumed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true", help="also measure E(B) of digits")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("."))
    options = parser.parse_args()
    paper(options.folder)
    if options.measure:
        measured(options.folder)
