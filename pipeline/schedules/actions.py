"""Actions: what one rank does for one micro-batch, and how that is written.

A schedule is, for each rank, a line of actions. This module defines the action, its text form and
what each action means for whoever executes, checks or simulates a line.

    schedule    = { line }
    line        = rank ":" { action }
    action      = compute | boundary | stash
    compute     = ( "F" | "B" | "W" ) name
    boundary    = ( "SEND_F" | "SEND_B" ) name ">" rank | ( "RECV_F" | "RECV_B" ) name "<" rank
    stash       = ( "EVICT" | "RETURN" ) name ">" rank | ( "LOAD" | "ACCEPT" ) name "<" rank
    name        = microbatch [ "." chunk ]
    rank, microbatch, chunk = decimal number of up to nine digits

Actions are separated by blanks; blank lines and what follows a `#` are ignored. `F3.1` is the
forward pass of micro-batch 3 through the rank's model chunk 1; chunk 0 is not written. The chunk
is always one of the line's own rank, in receives too; only `ACCEPT` and `RETURN`, which handle the
partner's stash, name it as the partner does.

What the actions mean:

1. `F` makes a stash (the activations that its backward will need), `B` uses it up. In a schedule
   that has `W` actions, `B` computes the gradient of the input alone and hands on to `W`, which
   computes the gradients of the weights.
2. Communication actions are starts: consecutive ones are posted together and the line goes on. A
   compute action waits for what it needs: `F` and `B` for their `RECV`, `B` for its `LOAD`.
3. A `SEND` and its `RECV` have the same tag, see `Schedule.tag`.
4. The stash transfers between two partners run one at a time, in the order in which both lines
   list them. A stash on its way takes up memory at both ends: at the receiving one since the
   transfer runs (not since it was posted), at the sending one until it has arrived.
5. `F` needs memory, so it waits until every `EVICT` is complete that its line lists before the
   preceding compute action: an eviction has at least one computation to hide behind.

With rules 4 and 5, what a rank holds at most follows from the text alone.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import partial
from typing import NamedTuple

from pipeline.errors import ScheduleError


class Kind(str, Enum):
    """What an action does; the value is how the text form begins."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    EVICT = "EVICT"
    LOAD = "LOAD"
    ACCEPT = "ACCEPT"
    RETURN = "RETURN"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
# Sender's action → the action of its peer that it pairs with; the first two move boundary tensors
# (activations, gradients) to a neighbour stage, the others move stashes to a partner and back.
BOUNDARY = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}
STASH = {Kind.EVICT: Kind.ACCEPT, Kind.RETURN: Kind.LOAD}
# Every action of communication → the one it pairs with.
COUNTERPART = {
    **BOUNDARY,
    **STASH,
    **{receive: send for send, receive in (BOUNDARY | STASH).items()},
}
SENDS = frozenset(BOUNDARY) | frozenset(STASH)
RECEIVES = frozenset(COUNTERPART) - SENDS
STASH_TRANSFERS = frozenset(STASH) | frozenset(STASH.values())

_PATTERN = re.compile(
    r"(?:(?P<compute>[FBW])|(?P<send>SEND_[FB]|EVICT|RETURN)|(?P<receive>RECV_[FB]|LOAD|ACCEPT))"
    r"(?P<microbatch>\d{1,9})(?:\.(?P<chunk>\d{1,9}))?"
    r"(?P<peer>(?(send)>\d{1,9}|(?(receive)<\d{1,9})))"
)


class Action(NamedTuple):
    """One action of one rank.

    Attributes:
        kind: what it does.
        microbatch: the micro-batch it does it for, from 0.
        chunk: the model chunk of the rank, from 0.
        peer: the other rank in a communication, else None.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        name = f"{self.microbatch}.{self.chunk}" if self.chunk else f"{self.microbatch}"
        if self.peer is None:
            return f"{self.kind.value}{name}"
        return f"{self.kind.value}{name}{'>' if self.kind in SENDS else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads one action from its text form.

        Raises:
            ScheduleError: if `text` is not an action.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; actions look like F0, B3.1, SEND_F0>1, RECV_B0<1, "
                "EVICT0>3, LOAD0<3, ACCEPT0<0, RETURN0>0"
            )
        kind = Kind(match["compute"] or match["send"] or match["receive"])
        peer = int(match["peer"][1:]) if match["peer"] else None
        return cls(kind, int(match["microbatch"]), int(match["chunk"] or 0), peer)


# Makes an action of a tuple of its four fields; in the loops that make hundreds of thousands, much
# faster than `Action(...)`.
action_of = partial(tuple.__new__, Action)
