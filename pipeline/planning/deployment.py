"""From a plan to the pipeline that it planned, on the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from pipeline.errors import UsageError
from pipeline.planning.training_plan import Plan


def arguments_of(
    plan: Plan | str | PathLike[str],
    layers: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
) -> dict[str, Any]:
    """The arguments of `Pipeline` for a plan; see `Pipeline.from_plan`.

    Raises:
        UsageError: if the plan is for another number of ranks than this job has, or it is of a file
            and the model is not given.
        PlanningError: if the file holds no plan.
    """
    import horovod.tensorflow as hvd

    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    given = (layers, loss, optimizer)
    planned = found.model or given
    layers, loss, optimizer = (
        theirs if own is None else own for own, theirs in zip(given, planned, strict=True)
    )
    if layers is None or loss is None or optimizer is None:
        raise UsageError("the plan is of a file: also pass layers, loss= and optimizer=")
    ranks = found.setting.stages * found.setting.replicas
    if hvd.is_initialized() and hvd.size() != ranks:
        raise UsageError(
            f"the plan is for {ranks} ranks, the job has {hvd.size()}; start it with: "
            f"{found.launch_line()}"
        )
    return {"layers": layers, "loss": loss, "optimizer": optimizer, **found.arguments()}
