"""Progress on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display:
    """A bar a program on a terminal, else a line a program."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", style="dim"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def start(self, title: str, blocks: int) -> None:
        """Begins a program that has so many blocks."""
        self._task = self._bars.add_task(title, total=blocks, completed=-1, now="building")
        if not self._console.is_terminal:
            self._console.print(Text(f"{title}: started"))

    def block(self, now: str) -> None:
        """A block is about to begin."""
        self._bars.update(self._task, advance=1, now=now)

    def end(self, title: str, outcome: str) -> None:
        """Ends a program."""
        self._bars.update(self._task, advance=1, now=outcome)
        if not self._console.is_terminal:
            self._console.print(Text(f"{title}: {outcome}"))
