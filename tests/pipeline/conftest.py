"""One launch of four ranks for the samples of all modules, since starting takes the most time."""

from pathlib import Path

import pytest
from launch import launch

PROGRAM = Path(__file__).parent / "ranks_samples.py"
# For the launch, and for the first test that needs it.
SECONDS = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit of a test that may have to wait for the launch."""
    for item in items:
        if "samples" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(SECONDS + 50))


@pytest.fixture(scope="session")
def samples(request: pytest.FixtureRequest) -> dict[str, dict]:
    """What each case found of those that the collected tests with a parameter `name` ask for."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if "samples" in getattr(item, "fixturenames", ())
    ]
    return launch(PROGRAM, 4, *names, seconds=SECONDS)
