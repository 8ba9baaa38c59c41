"""Every program of the table gives, co-executed, what it gives in eager mode."""

import pytest

from .table import Program, load
from .worker import Worker

# A row takes seconds; what takes longer hangs. The process is stopped before pytest would be.
ROW_SECONDS = 60.0
pytestmark = pytest.mark.timeout(240)

ROWS = [
    pytest.param(row, keras, id=row.name if keras == "3" else f"{row.name}-tf_keras")
    for row in load().values()
    for keras in row.generations
]


@pytest.fixture(scope="module")
def workers():
    """Keras generation -> the process that runs its rows."""
    started = {keras: Worker(keras) for keras in ("3", "2")}
    yield started
    problems = [worker.close() for worker in started.values()]
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.parametrize(("row", "keras"), ROWS)
def test_coexecution_equals_eager(row: Program, keras: str, workers: dict[str, Worker]):
    verdict = workers[keras].run(row.name, ROW_SECONDS)
    assert not verdict.problems, "\n".join([row.name, *verdict.problems, str(verdict.stats)])


@pytest.mark.full
@pytest.mark.parametrize(("row", "keras"), ROWS)
def test_coexecution_equals_eager_when_each_step_is_read(
    row: Program, keras: str, workers: dict[str, Worker]
):
    verdict = workers[keras].run(row.name, ROW_SECONDS, read="each")
    assert not verdict.problems, "\n".join([row.name, *verdict.problems, str(verdict.stats)])


@pytest.mark.full
@pytest.mark.parametrize(("row", "keras"), ROWS)
def test_rows_are_deterministic(row: Program, keras: str, workers: dict[str, Worker]):
    """Eager against eager: a difference would be the program's or the harness's own fault."""
    verdict = workers[keras].run(row.name, ROW_SECONDS, candidate="eager")
    assert not verdict.problems, "\n".join([row.name, *verdict.problems])
