"""HybridModel: when more replicas stop paying, and splitting the model pays instead.

After Pal et al. (arXiv 1907.13257): the time to a target is T · S · E, the seconds of a step times
the steps of an epoch times the epochs. More replicas shorten the epoch, but each step also waits
for a reduction (scaling efficiency SE_N), and the larger global batch needs more epochs (E_N):

    data parallel on N devices:        SU_DP(N)  = SE_N · N · E_1 / E_N
    hybrid, N workers of M devices:    SU_M · SU_DP(N)         on M · N devices

so that the hybrid wins on M · N devices if and only if

    SU_M > M · (SE_MN / SE_N) · (E_N / E_MN).

All of it is arithmetic on what the user measured or gives: `planning.epochs` has E(B),
`planning.efficiency` SE_N, and a placement or a pipeline gives SU_M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from pipeline.errors import HybridError
from pipeline.planning.checks import number, read_json
from pipeline.planning.efficiency import RingModel, ScalingPoints
from pipeline.planning.epochs import EpochFit, EpochTable

Curve = EpochTable | EpochFit | Callable[[float], float] | Mapping[float, float]
Scaling = ScalingPoints | RingModel | Callable[[int], float] | Mapping[int, float]


@dataclass(frozen=True)
class Strategy:
    """One way to use the devices.

    Attributes:
        devices: how many are used.
        ways: M, devices of a worker.
        replicas: N, workers that train data-parallel.
        speedup: against one device, until the target is reached.
        seconds: until the target is reached, or None where the model knows no step time.
    """

    devices: int
    ways: int
    replicas: int
    speedup: float
    seconds: float | None

    def __str__(self) -> str:
        kind = "data parallel" if self.ways == 1 else f"{self.ways}-way model parallel"
        return (
            f"{self.replicas} workers x {self.ways} ({kind}), {self.speedup:.4g} times one device"
        )


@dataclass(frozen=True)
class HybridModel:
    """The model of end-to-end training time.

    Attributes:
        batch: samples of a worker's mini-batch; the global batch of N workers is N times that.
        epochs: E(B): a table, a fit, a function of the global batch, or a mapping as a table.
        efficiency: SE_N: measured points, a ring model, a function of N, or a mapping as points.
        model_speedup: M → SU_M, how many times faster M devices do a worker's step than one.
        step_seconds: T of one device, for times; None: speed-ups alone.
        samples: in an epoch, for times.

    Raises:
        HybridError: if E(B) is missing, or a number cannot be.
    """

    batch: float
    epochs: Curve | None = None
    efficiency: Scaling = field(default_factory=lambda: ScalingPoints({1: 1.0}))
    model_speedup: Mapping[int, float] = field(default_factory=dict)
    step_seconds: float | None = None
    samples: float | None = None

    def __post_init__(self) -> None:
        number(self.batch, "hybrid model", "batch", HybridError, positive=True)
        if self.epochs is None:
            raise HybridError(
                "the hybrid model has no E(B), field 'epochs': give a table {global batch: epochs}"
                ", a fit, or measure one with planning.measure_epochs",
                "missing-field",
                "field 'epochs'",
            )
        if isinstance(self.epochs, Mapping):
            object.__setattr__(self, "epochs", EpochTable(self.epochs))
        if isinstance(self.efficiency, Mapping):
            object.__setattr__(self, "efficiency", ScalingPoints(self.efficiency))
        for ways, speedup in self.model_speedup.items():
            where = f"model_speedup[{ways!r}]"
            if isinstance(ways, bool) or not isinstance(ways, int) or ways < 2:
                raise HybridError(f"{where}: M must be a whole number above 1", "ways", where)
            number(speedup, where, "SU_M", HybridError, positive=True)
        for name in ("step_seconds", "samples"):
            if getattr(self, name) is not None:
                number(getattr(self, name), "hybrid model", name, HybridError, positive=True)

    @property
    def ways(self) -> tuple[int, ...]:
        """All M that it knows, 1 included."""
        return (1, *sorted(self.model_speedup))

    def scaling(self, workers: int) -> float:
        """SE_N: the step time of one worker over that of N.

        Raises:
            HybridError: if it is not known for so many, or is no share.
        """
        value = 1.0 if workers == 1 else self.efficiency(workers)
        return number(value, f"efficiency of {workers} workers", "SE_N", HybridError, positive=True)

    def epochs_of(self, workers: int) -> float:
        """E_N: the epochs until the target with the global batch of N workers.

        Raises:
            HybridError: if E(B) is not known for that batch.
        """
        batch = workers * self.batch
        value = self.epochs(batch)
        return number(value, f"E({batch:g})", "epochs", HybridError, positive=True)

    def speedup(self, devices: int, ways: int = 1) -> float:
        """How many times faster than one device training reaches its target.

        Args:
            devices: all devices, M · N.
            ways: M, how many of them work on one worker's step.

        Raises:
            HybridError: if M does not divide the devices or SU_M is not known.
        """
        workers = self._workers(devices, ways)
        alone = 1.0 if ways == 1 else self.model_speedup[ways]
        replicas = self.scaling(workers) * workers
        return alone * replicas * self.epochs_of(1) / self.epochs_of(workers)

    def seconds(self, devices: int, ways: int = 1) -> float:
        """T · S · E: the time until the target.

        Raises:
            HybridError: if `step_seconds` or `samples` was not given.
        """
        for name in ("step_seconds", "samples"):
            if getattr(self, name) is None:
                raise HybridError(
                    f"times need the field {name!r}, which was not given", "missing-field", name
                )
        workers = self._workers(devices, ways)
        alone = 1.0 if ways == 1 else self.model_speedup[ways]
        step = self.step_seconds / (alone * self.scaling(workers))
        return step * self.samples / (workers * self.batch) * self.epochs_of(workers)

    def win_threshold(self, workers: int, ways: int) -> float:
        """What SU_M has to exceed for N workers of M devices to beat M · N replicas."""
        scaling = self.scaling(ways * workers) / self.scaling(workers)
        return ways * scaling * self.epochs_of(workers) / self.epochs_of(ways * workers)

    def hybrid_wins(self, devices: int, ways: int) -> bool:
        """Whether M-way workers beat data parallelism on so many devices."""
        return self.model_speedup[ways] > self.win_threshold(self._workers(devices, ways), ways)

    def can_predict(self, devices: int, ways: int = 1) -> bool:
        """Whether everything that is needed for so many devices is known."""
        try:
            self.speedup(devices, ways)
        except HybridError:
            return False
        return True

    def strategies(self, devices: int) -> list[Strategy]:
        """What can be done with at most so many devices, the best first.

        Fewer devices than there are may be best: data parallelism can get slower by more of them.

        Raises:
            HybridError: if nothing can be predicted.
        """
        found = []
        for ways in self.ways:
            for used in _counts(devices, ways):
                if self.can_predict(used, ways):
                    timed = self.step_seconds is not None and self.samples is not None
                    seconds = self.seconds(used, ways) if timed else None
                    speedup = self.speedup(used, ways)
                    found.append(Strategy(used, ways, used // ways, speedup, seconds))
        if not found:
            raise HybridError(
                f"E(B) is not known for a single worker's batch of {self.batch:g}", "unknown-batch"
            )
        return sorted(found, key=lambda one: (-one.speedup, one.devices))

    def best(self, devices: int) -> Strategy:
        """The best use of at most so many devices; see `strategies`."""
        return self.strategies(devices)[0]

    def crossover(self, ways: int, most: int = 4096) -> int | None:
        """The least number of devices (M times a power of two) on which M-way workers win.

        Returns:
            The number; None if data parallelism wins wherever both are known, up to `most`.
        """
        devices = ways
        while devices <= most:
            known = self.can_predict(devices, ways) and self.can_predict(devices)
            if known and self.hybrid_wins(devices, ways):
                return devices
            devices *= 2
        return None

    def curves(self, devices: Iterable[int]) -> dict[int, dict[int, float]]:
        """M → number of devices → speed-up, for all that can be predicted."""
        counts = list(devices)
        return {
            ways: {
                count: self.speedup(count, ways)
                for count in counts
                if count % ways == 0 and self.can_predict(count, ways)
            }
            for ways in self.ways
        }

    def table(self, devices: Iterable[int]) -> str:
        """The curves as a table for people."""
        counts = sorted(set(devices))
        curves = self.curves(counts)
        heads = ["data parallel", *(f"hybrid M={ways}" for ways in self.ways[1:])]
        lines = ["devices  " + "  ".join(f"{head:>13}" for head in heads) + "  best"]
        for count in counts:
            known = {ways: curve[count] for ways, curve in curves.items() if count in curve}
            cells = [f"{known[ways]:>13.4g}" if ways in known else f"{'-':>13}" for ways in curves]
            best = max(known, key=known.__getitem__, default=None)
            text = {None: "not known", 1: "data parallel"}.get(best, f"hybrid M={best}")
            lines.append(f"{count:>7}  " + "  ".join(cells) + f"  {text}")
        return "\n".join(lines)

    def plot(self, path: str | PathLike[str], devices: Iterable[int], title: str = "") -> None:
        """Draws the curves into a PNG file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from pipeline.planning.plots import plot_hybrid

        plot_hybrid(self, sorted(set(devices)), path, title)

    def _workers(self, devices: int, ways: int) -> int:
        if ways != 1 and ways not in self.model_speedup:
            raise HybridError(
                f"no SU_M is known for M={ways}, field 'model_speedup'", "missing-field", "SU_M"
            )
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise HybridError(f"devices must be a whole number above 0, not {devices!r}", "devices")
        if devices % ways:
            raise HybridError(f"{ways}-way workers do not divide {devices} devices", "devices")
        return devices // ways

    # --- files ---------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | PathLike[str]) -> HybridModel:
        """Reads a JSON file; see `from_dict`."""
        return cls.from_dict(read_json(path, HybridError))

    @classmethod
    def from_dict(cls, data: Any) -> HybridModel:
        """A model from what a JSON file holds.

            {"batch": 64, "step_seconds": 0.3, "samples": 1281167,
             "epochs": {"64": 90, "8192": 95},        or {"floor": 40, "slope": 0.01}
             "efficiency": {"1": 1, "64": 0.9},       or {"gradient_bytes": 1e8, "bandwidth": 1e10}
             "model_speedup": {"2": 1.3}}

        Raises:
            HybridError: if a field is missing, unknown or cannot be.
        """
        if not isinstance(data, dict):
            raise HybridError(
                f"a hybrid model is an object, not {type(data).__name__}", "no-object"
            )
        known = {"batch", "epochs", "efficiency", "model_speedup", "step_seconds", "samples"}
        unknown = sorted(set(data) - known - {"name", "sources"})
        if unknown:
            raise HybridError(
                f"a hybrid model has no field {unknown[0]!r}; it has {', '.join(sorted(known))}",
                "unknown-field",
                unknown[0],
            )
        for name in ("batch", "epochs"):
            if data.get(name) is None:
                raise HybridError(
                    f"the hybrid model lacks the field {name!r}"
                    + (", E(B)" if name == "epochs" else ""),
                    "missing-field",
                    f"field {name!r}",
                )
        step = data.get("step_seconds")
        speedups = _object(data, "model_speedup")
        return cls(
            batch=data["batch"],
            epochs=_epochs(_object(data, "epochs")),
            efficiency=_efficiency(_object(data, "efficiency") or {"1": 1.0}, step),
            model_speedup={_whole(ways, "model_speedup"): su for ways, su in speedups.items()},
            step_seconds=step,
            samples=data.get("samples"),
        )


def _counts(devices: int, ways: int) -> list[int]:
    """Multiples of M up to so many: all that are powers of two times M, and the largest."""
    if devices < 1:
        raise HybridError(f"devices must be a whole number above 0, not {devices!r}", "devices")
    counts = {ways * 2**i for i in range(int(math.log2(max(devices, 1))) + 1)}
    counts.add(devices // ways * ways)
    return sorted(count for count in counts if 0 < count <= devices)


def _object(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name) or {}
    if not isinstance(found, dict):
        raise HybridError(f"field {name!r} must be an object, not {found!r}", "no-object", name)
    return found


def _epochs(data: dict[str, Any]) -> EpochTable | EpochFit:
    if "floor" in data:
        return EpochFit(floor=data["floor"], slope=data.get("slope", 0.0))
    return EpochTable({_real(batch, "epochs"): value for batch, value in data.items()})


def _efficiency(data: dict[str, Any], step: Any) -> ScalingPoints | RingModel:
    if "gradient_bytes" in data:
        if step is None:
            raise HybridError(
                "a ring model needs the field 'step_seconds'", "missing-field", "step_seconds"
            )
        unknown = sorted(set(data) - {"gradient_bytes", "bandwidth", "latency", "overlap"})
        if unknown:
            raise HybridError(f"a ring model has no field {unknown[0]!r}", "unknown-field")
        if "bandwidth" not in data:
            raise HybridError(
                "a ring model needs the field 'bandwidth'", "missing-field", "bandwidth"
            )
        return RingModel(step_seconds=step, **data)
    return ScalingPoints({_whole(workers, "efficiency"): value for workers, value in data.items()})


def _whole(text: str, name: str) -> int:
    if not text.isdecimal():
        raise HybridError(f"field {name!r}: {text!r} is not a whole number", "no-number", name)
    return int(text)


def _real(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise HybridError(f"field {name!r}: {text!r} is not a number", "no-number", name) from None
