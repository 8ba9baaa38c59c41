"""Schedule: one line of actions for each rank, its text form, and questions about it.

A schedule is plain data. It is built by `pipeline.schedules.generators`, printed and parsed here,
proven by `validation`, shown over time and priced by `pipeline.simulation`, executed by the
runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import ScheduleError
from pipeline.schedules.actions import STASH_TRANSFERS, Action, Kind
from pipeline.schedules.placement import Placement
from pipeline.schedules.table import Table

if TYPE_CHECKING:
    from pipeline.schedules.validation import ValidationReport


class Tag(NamedTuple):
    """What a message holds; the same at both ends, and unique among a step's messages.

    Attributes:
        kind: `F` for activations, `B` for their gradients, `EVICT` and `LOAD` for stashes.
        microbatch: the micro-batch.
        virtual_stage: for `F` and `B` the virtual stage that computed it, else the stash's.
    """

    kind: str
    microbatch: int
    virtual_stage: int


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one step, in order.

    Two schedules are equal if their lines are; the name is for people.

    Attributes:
        actions: for each rank, the actions of its line.
        name: what the schedule is called, for example `1f1b`.
        placement: which virtual stages the ranks' chunks hold.
    """

    actions: tuple[tuple[Action, ...], ...]
    name: str = field(default="schedule", compare=False)
    placement: Placement = field(default=Placement.LOOP, compare=False)

    @classmethod
    def of_table(cls, table: Table, name: str, placement: Placement) -> Schedule:
        """The schedule of actions that are numbers; they become actions when asked for."""
        schedule = object.__new__(cls)
        vars(schedule).update(table=table, name=name, placement=placement)
        return schedule

    def __getattr__(self, name: str) -> Any:
        if name != "actions" or "table" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        actions = vars(self)["actions"] = self.table.actions()
        return actions

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages p, which is the number of ranks."""
        return len(self.table.starts) - 1

    @cached_property
    def table(self) -> Table:
        """The actions as columns of numbers."""
        return Table.of_actions(self.actions)

    @cached_property
    def num_microbatches(self) -> int:
        """The number of micro-batches m."""
        return 1 + int(self.table.microbatch.max(initial=-1))

    @cached_property
    def num_chunks(self) -> int:
        """The number of model chunks v that each rank holds."""
        return 1 + int(self.table.chunk.max(initial=0))

    @property
    def num_virtual_stages(self) -> int:
        """The number of parts that the model is cut into, p·v."""
        return self.num_stages * self.num_chunks

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own (`W`)."""
        return self.table.has(Kind.WEIGHT)

    @cached_property
    def evicts(self) -> bool:
        """Whether stashes are moved between partners."""
        return self.table.has(Kind.EVICT)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that `rank` holds as its model chunk `chunk`."""
        return self.placement.virtual_stage(rank, chunk, self.num_stages)

    def tag(self, rank: int, action: Action) -> Tag:
        """The tag of the message that `action`, of the line of `rank`, sends or receives.

        Raises:
            ValueError: if the action computes.
        """
        kind, microbatch, chunk, peer = action
        if peer is None:
            raise ValueError(f"{action} is no communication, it has no tag")
        if kind in STASH_TRANSFERS:
            owner = rank if kind in (Kind.EVICT, Kind.LOAD) else peer
            name = "EVICT" if kind in (Kind.EVICT, Kind.ACCEPT) else "LOAD"
            return Tag(name, microbatch, self.virtual_stage(owner, chunk))
        stage = self.virtual_stage(rank, chunk)
        if kind is Kind.RECV_FORWARD:
            return Tag("F", microbatch, stage - 1)
        if kind is Kind.RECV_BACKWARD:
            return Tag("B", microbatch, stage + 1)
        return Tag("F" if kind is Kind.SEND_FORWARD else "B", microbatch, stage)

    def __str__(self) -> str:
        return "\n".join(
            f"{rank}: {' '.join(map(str, line))}".rstrip() for rank, line in enumerate(self.actions)
        )

    @classmethod
    def parse(cls, text: str, name: str = "schedule") -> Schedule:
        """Reads a schedule from its text form, whose grammar `schedules.actions` documents.

        The placement of model chunks is inferred from the peers that forward passes send to.

        Args:
            text: one line for each rank.
            name: what the schedule is to be called.

        Raises:
            TypeError: if it is no text.
            ScheduleError: if the text is not of that form. Whether the schedule can be run is
                for `validate` to say.
        """
        if not isinstance(text, str):
            raise TypeError(f"a schedule is read from a str, not from {type(text).__name__}")
        lines: dict[int, tuple[Action, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            line = line.split("#", 1)[0].strip()
            if not line:
                continue
            rank, actions = _parse_line(line, number)
            if rank in lines:
                raise ScheduleError(f"line {number}: rank {rank} has a line already")
            lines[rank] = actions
        if not lines:
            raise ScheduleError("the text holds no line; each rank needs one, like '0: F0 B0'")
        for rank in range(len(lines)):
            if rank not in lines:
                raise ScheduleError(f"rank {rank} has no line; ranks count from 0 without gaps")
        actions = tuple(lines[rank] for rank in range(len(lines)))
        return cls(actions, name, infer_placement(actions))

    @cached_property
    def proven_peaks(self) -> tuple[int, ...]:
        """For each rank, the stashes it holds at most; proves the schedule first."""
        from pipeline.schedules.validation import prove

        return prove(self)

    def validate(
        self,
        limit: int | Sequence[int] | None = None,
        stash_bytes: float | Sequence[float] | None = None,
        byte_limit: float | Sequence[float] | None = None,
    ) -> ValidationReport:
        """Proves that the schedule can be run; see `schedules.validation.validate`."""
        from pipeline.schedules.validation import validate

        return validate(self, limit, stash_bytes, byte_limit)

    def grid(self, width: int = 120) -> str:
        """The schedule over time, for people; see `simulation.grid.grid`."""
        from pipeline.simulation.grid import grid

        return grid(self, width)


def _parse_line(line: str, number: int) -> tuple[int, tuple[Action, ...]]:
    head, colon, rest = line.partition(":")
    if not colon or not head.strip().isdecimal():
        raise ScheduleError(f"line {number} does not begin with a rank and a colon: {line!r}")
    words = rest.split()
    actions = []
    for position, word in enumerate(words):
        try:
            actions.append(Action.parse(word))
        except ScheduleError as error:
            shown = " ".join(words[: position + 1])
            raise ScheduleError(
                f"line {number}: {error}\n  {head.strip()}: {shown} <--",
                rank=int(head),
                position=position,
            ) from None
    return int(head), tuple(actions)


def infer_placement(actions: Iterable[Sequence[Action]]) -> Placement:
    """The placement that the forward passes' peers speak for; a loop where none does.

    Activations of odd chunks go to the next rank in a loop and to the one before in a zigzag. With
    two ranks these are the same, but a loop has messages that a zigzag has not.
    """
    lines = list(actions)
    loop = zigzag = 0
    for rank, line in enumerate(lines):
        for action in line:
            if action.chunk % 2 and action.kind is Kind.SEND_FORWARD:
                loop += action.peer == (rank + 1) % len(lines)
                zigzag += action.peer == rank - 1
            elif action.chunk % 2 and action.kind is Kind.RECV_FORWARD:
                loop += action.peer == (rank - 1) % len(lines)
                zigzag += action.peer == rank + 1
    return Placement.ZIGZAG if zigzag and zigzag >= loop else Placement.LOOP
