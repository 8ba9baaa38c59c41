"""Plays a schedule through in a random order of events: the independent check of the validator.

It knows the rules of `pipeline.schedules.actions` and nothing of the validator: at any moment, any
rank may take its next action if that need not wait, any transfer that may run may start, and any
running transfer may end. What a rank holds is counted as it happens.
"""

from __future__ import annotations

import random

from pipeline.schedules import Kind, Schedule

COMPUTE = {Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT}
STASH = {Kind.EVICT, Kind.LOAD, Kind.ACCEPT, Kind.RETURN}


def play(schedule: Schedule, seed: int) -> list[int]:
    """Plays the schedule to its end; returns the most stashes that each rank held."""
    return _Player(schedule, random.Random(seed)).play()


class _Player:
    def __init__(self, schedule, chance):
        self.schedule = schedule
        self.chance = chance
        ranks = range(schedule.num_stages)
        self.next = [0 for _ in ranks]
        self.held = [0 for _ in ranks]
        self.most = [0 for _ in ranks]
        self.done = set()  # (kind, microbatch, virtual stage)
        self.posted = {}  # tag → number of ends that have posted it
        self.arrived = set()  # tags
        self.running = set()  # tags of stash transfers
        self.pairs = {}  # (rank, partner) → tags in order, as the lower rank lists them
        self.ends = {}  # tag → (from rank, to rank)
        for rank, line in enumerate(schedule.actions):
            for action in line:
                if action.kind in STASH and rank < action.peer:
                    tag = schedule.tag(rank, action)
                    self.pairs.setdefault((rank, action.peer), []).append(tag)

    def play(self):
        while True:
            moves = [(self.act, rank) for rank in range(len(self.next)) if self.may_act(rank)]
            moves += [(self.start, pair) for pair in self.pairs if self.may_start(pair)]
            moves += [(self.end, tag) for tag in sorted(self.running)]
            if not moves:
                break
            move, argument = self.chance.choice(moves)
            move(argument)
        left = [len(line) - at for line, at in zip(self.schedule.actions, self.next, strict=True)]
        assert not any(left), f"ranks are stuck with {left} actions left"
        assert not any(self.held), f"stashes are left over: {self.held}"
        return self.most

    def may_act(self, rank):
        line, at = self.schedule.actions[rank], self.next[rank]
        if at == len(line):
            return False
        kind, microbatch, chunk, _ = line[at]
        if kind not in COMPUTE:
            return True
        stage = self.schedule.virtual_stage(rank, chunk)
        if kind is Kind.WEIGHT:
            return (Kind.BACKWARD, microbatch, stage) in self.done
        if kind is Kind.FORWARD:
            before_last = [i for i in range(at) if line[i].kind in COMPUTE][-1:]
            evictions = [a for a in line[: (before_last or [0])[0]] if a.kind is Kind.EVICT]
            if any(self.schedule.tag(rank, a) not in self.arrived for a in evictions):
                return False
            return stage == 0 or self.has(rank, Kind.FORWARD, microbatch, stage - 1)
        if (Kind.FORWARD, microbatch, stage) not in self.done:
            return False
        loads = [a for a in line if a[:3] == (Kind.LOAD, microbatch, chunk)]
        if any(self.schedule.tag(rank, a) not in self.arrived for a in loads):
            return False
        last = self.schedule.num_virtual_stages - 1
        return stage == last or self.has(rank, Kind.BACKWARD, microbatch, stage + 1)

    def has(self, rank, kind, microbatch, source):
        """Whether what `source` computed has reached the rank."""
        home, _ = self.schedule.placement.rank_and_chunk(source, self.schedule.num_stages)
        if home == rank:
            return (kind, microbatch, source) in self.done
        return self.posted.get((kind.value, microbatch, source)) == 2

    def act(self, rank):
        action = self.schedule.actions[rank][self.next[rank]]
        self.next[rank] += 1
        kind, microbatch, chunk, peer = action
        if kind in COMPUTE:
            stage = self.schedule.virtual_stage(rank, chunk)
            self.done.add((kind, microbatch, stage))
            if kind is Kind.FORWARD:
                self.change(rank, 1)
            elif kind is (Kind.WEIGHT if self.schedule.splits_backward else Kind.BACKWARD):
                self.change(rank, -1)
            return
        tag = self.schedule.tag(rank, action)
        self.posted[tag] = self.posted.get(tag, 0) + 1
        if kind in (Kind.EVICT, Kind.RETURN):
            self.ends[tag] = (rank, peer)
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            stage = self.schedule.virtual_stage(rank, chunk)
            computed = Kind.FORWARD if kind is Kind.SEND_FORWARD else Kind.BACKWARD
            assert (computed, microbatch, stage) in self.done, f"{action} before it is computed"

    def may_start(self, pair):
        waiting = self.pairs[pair]
        return bool(waiting) and self.posted.get(waiting[0]) == 2 and waiting[0] not in self.running

    def start(self, pair):
        tag = self.pairs[pair][0]
        self.running.add(tag)
        self.change(self.ends[tag][1], 1)

    def end(self, tag):
        self.running.discard(tag)
        self.arrived.add(tag)
        for pair, waiting in self.pairs.items():
            if waiting and waiting[0] == tag:
                self.pairs[pair] = waiting[1:]
                break
        self.change(self.ends[tag][0], -1)

    def change(self, rank, by):
        self.held[rank] += by
        self.most[rank] = max(self.most[rank], self.held[rank])
