"""The hybrid model: its formulas, the win condition as an identity, E(B), refusals, pictures."""

import math
import random

import pytest

from pipeline.planning import (
    EpochFit,
    EpochTable,
    HybridError,
    HybridModel,
    RingModel,
    ScalingPoints,
    measure_epochs,
)


def random_model(rng: random.Random) -> HybridModel:
    epochs, value = {}, rng.uniform(1, 5)
    for power in range(11):
        epochs[32.0 * 2**power] = value
        value *= rng.uniform(1.0, 2.2)
    scaling, share = {}, 1.0
    for power in range(11):
        scaling[2**power] = share
        share *= rng.uniform(0.8, 1.0)
    speedups = {m: rng.uniform(1.0, m) for m in (2, 4, 8)}
    return HybridModel(32.0, epochs, scaling, speedups, step_seconds=0.2, samples=1e5)


@pytest.mark.parametrize("seed", range(20))
def test_the_win_condition_is_an_identity(seed):
    model = random_model(random.Random(seed))
    for ways in (2, 4, 8):
        for workers in (1, 2, 4, 16, 64):
            devices = ways * workers
            hybrid, replicas = model.speedup(devices, ways), model.speedup(devices)
            assert model.hybrid_wins(devices, ways) == (hybrid > replicas)
            # The threshold is the SU_M at which both are equal.
            threshold = model.win_threshold(workers, ways)
            assert hybrid / model.model_speedup[ways] * threshold == pytest.approx(replicas)


@pytest.mark.parametrize("seed", range(5))
def test_speedups_are_ratios_of_times(seed):
    model = random_model(random.Random(seed))
    for ways in model.ways:
        ratio = model.seconds(1) / model.seconds(64, ways)
        assert model.speedup(64, ways) == pytest.approx(ratio)
    best = model.best(64)
    tried = [
        model.speedup(used, ways)
        for ways in model.ways
        for used in (1, 2, 4, 8, 16, 32, 64)
        if used % ways == 0
    ]
    assert best.speedup == pytest.approx(max(tried))
    assert best.seconds == pytest.approx(model.seconds(best.devices, best.ways))
    curves = model.curves([8, 16])
    assert curves[4][16] == model.speedup(16, 4)


def test_formulas_by_hand():
    model = HybridModel(10.0, {10: 4, 20: 5, 40: 10}, {1: 1.0, 2: 0.9, 4: 0.8}, {2: 1.5})
    assert model.speedup(1) == 1.0
    assert model.speedup(2) == pytest.approx(0.9 * 2 * 4 / 5)
    assert model.speedup(4) == pytest.approx(0.8 * 4 * 4 / 10)
    assert model.speedup(4, 2) == pytest.approx(1.5 * 0.9 * 2 * 4 / 5)
    # DP: 1, 1.44, 1.28; hybrid: 1.5 on 2 devices, 2.16 on 4.
    assert model.crossover(2) == 2 and model.best(4).ways == 2
    assert model.win_threshold(2, 2) == pytest.approx(2 * 0.8 / 0.9 * 5 / 10)
    assert "hybrid M=2" in model.table([1, 2, 4])


def test_never_crossing_is_none_and_idle_devices_may_be_best():
    flat = HybridModel(1.0, lambda batch: 3.0, model_speedup={2: 1.5})
    assert flat.crossover(2, 1024) is None
    steep = HybridModel(1.0, lambda batch: batch**2)
    assert steep.best(64).devices == 1


def test_a_ring_moves_two_shares_of_the_bytes():
    ring = RingModel(step_seconds=1.0, gradient_bytes=100.0, bandwidth=50.0, latency=0.25)
    assert ring.reduction_seconds(1) == 0.0 and ring(1) == 1.0
    assert ring.reduction_seconds(4) == pytest.approx(2 * 3 / 4 * 100 / 50 + 2 * 3 * 0.25)
    assert ring(4) == pytest.approx(1 / (1 + 4.5))
    hidden = RingModel(1.0, 100.0, 50.0, 0.25, overlap=1.0)
    assert hidden(4) == 1.0


def test_points_between_are_interpolated():
    points = ScalingPoints({4: 0.8, 16: 0.6})
    assert points(2) == pytest.approx(0.9) and points(8) == pytest.approx(0.7)
    assert points(64) == 0.6
    table = EpochTable({100: 2.0, 400: 8.0})
    assert table(200) == pytest.approx(4.0) and table(100) == 2.0
    with pytest.raises(HybridError, match=r"E\(800\)"):
        table(800)


def test_the_fit_finds_the_curve_that_made_the_points():
    fit = EpochFit.of({b: 12 + 0.05 * b for b in (16, 64, 256, 1024)})
    assert fit.floor == pytest.approx(12) and fit.slope == pytest.approx(0.05)
    falling = EpochFit.of({1: 10.0, 2: 9.0})
    assert falling.slope == 0 and 9 < falling.floor < 10
    steep = EpochFit.of({1: 1.0, 10: 100.0})
    assert steep.floor > 0 and steep.slope > 0
    with pytest.raises(HybridError, match="two points"):
        EpochFit.of({1: 2.0})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: HybridModel(64.0), r"E\(B\).*'epochs'"),
        (lambda: HybridModel(64.0, {}), "'epochs'"),
        (lambda: HybridModel(64.0, {64: math.nan}), r"E\(64\)"),
        (lambda: HybridModel(64.0, {64: -1}), r"E\(64\)"),
        (lambda: HybridModel(0, {64: 1}), "'batch'"),
        (lambda: HybridModel(1.0, {1: 1}, {1: 1.0, 2: 0.0}), "SE_2"),
        (lambda: HybridModel(1.0, {1: 1}, model_speedup={1: 1.0}), "model_speedup"),
        (lambda: HybridModel(1.0, {1: 1}, model_speedup={2: math.inf}), "model_speedup"),
        (lambda: HybridModel(1.0, {1: 1}).speedup(2), r"E\(2\)"),
        (lambda: HybridModel(1.0, {1: 1}).speedup(2, 2), "SU_M"),
        (lambda: HybridModel(1.0, {1: 1}, model_speedup={2: 1.2}).speedup(3, 2), "divide"),
        (lambda: HybridModel(1.0, {1: 1}).seconds(1), "step_seconds"),
        (lambda: HybridModel.from_dict({"batch": 1}), "'epochs'"),
        (lambda: HybridModel.from_dict({"epochs": {"1": 1}}), "'batch'"),
        (lambda: HybridModel.from_dict({"batch": 1, "epochs": {"1": 1}, "x": 1}), "'x'"),
        (lambda: HybridModel.from_dict({"batch": 1, "epochs": {"one": 1}}), "'one'"),
        (
            lambda: HybridModel.from_dict(
                {
                    "batch": 1,
                    "epochs": {"1": 1},
                    "step_seconds": 1,
                    "efficiency": {"gradient_bytes": 1},
                }
            ),
            "'bandwidth'",
        ),
    ],
)
def test_refusals_name_the_field(make, match):
    with pytest.raises(HybridError, match=match):
        make()


def test_a_file_gives_the_same_model(tmp_path):
    data = {
        "name": "x",
        "batch": 4,
        "step_seconds": 0.5,
        "samples": 1000,
        "epochs": {"floor": 10, "slope": 0.5},
        "efficiency": {"gradient_bytes": 1e8, "bandwidth": 1e9, "latency": 1e-5},
        "model_speedup": {"2": 1.4},
    }
    model = HybridModel.from_dict(data)
    ring = RingModel(0.5, 1e8, 1e9, 1e-5)
    assert model.speedup(8) == pytest.approx(ring(8) * 8 * 12 / 26)
    assert model.ways == (1, 2)
    model.plot(tmp_path / "curves.png", [1, 2, 4, 8], "x")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_epochs_are_measured_by_training():
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")

    def build(batch):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["accuracy"])
        return model

    table = measure_epochs(build, (x, y), (x, y), [8, 128], target=0.9)
    # With one learning rate, 16 times fewer steps an epoch need more epochs.
    assert table(8) < table(128)
    with pytest.raises(HybridError, match="batch size 128 did not reach"):
        measure_epochs(build, (x, y), (x, y), [128], target=0.99, most_epochs=1)
