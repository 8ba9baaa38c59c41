"""A rank in trouble: every other rank raises and says what happened, in time, and nothing stays.

A case is what the trouble is, where it begins and on which rank; `ranks_failure.py` runs it.
"""

import json
import os
import re
import signal
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch import start

pytestmark = [pytest.mark.horovod, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parent / "ranks_failure.py"
TIMEOUT = 8.0  # of the pipelines
ACTION = r"stage \d, .*micro-batch \d"
# How each trouble shows in the others' errors.
WHY = {
    "raise": "rank {who} failed in {call}: ArithmeticError: this rank has a bug",
    "kill": "rank {who} was lost: its process has ended",
    "stop": r"nothing came within 8 s|not done within 8 s",
    "interrupt": "rank {who} failed in {call}: KeyboardInterrupt",
    "exit": "rank {who} failed in {call}: SystemExit|rank {who} has ended or closed its pipeline",
}


@dataclass
class Outcome:
    """What a launch left behind.

    Attributes:
        code: of the launcher.
        printed: by all.
        raised: by rank, how many seconds after the trouble began and what.
        seconds: from the trouble to the launcher's end.
    """

    code: int
    printed: str
    raised: dict[int, tuple[float, str]] = field(default_factory=dict)
    seconds: float = 0.0


def run(case, ranks=4, interrupt_launcher=False, **more):
    token = uuid.uuid4().hex
    shared = set(os.listdir("/dev/shm"))
    process = start(PROGRAM, ranks, json.dumps(case), PIPELINE_TEST_TOKEN=token, **more)
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if interrupt_launcher and "in trouble at" in line:
                process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:  # the test itself is interrupted
            process.terminate()
    ended = time.monotonic()
    printed = "".join(lines)
    assert "in trouble at" in printed, printed
    began = float(re.search(r"in trouble at ([\d.]+)", printed)[1])
    raised = {
        int(rank): (float(at) - began, text)
        for rank, at, text in re.findall(r"rank (\d) raised at ([\d.]+): (.*)", printed)
    }
    assert "went on" not in printed, printed
    nothing_stays(token, printed, shared)
    return Outcome(process.returncode, printed, raised, ended - began)


def nothing_stays(token, printed, shared):
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (path / "environ").read_bytes():
                left.append((path / "cmdline").read_bytes())
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    assert left == []
    names = re.findall(r"listens: (\S+) (\d+)", printed)
    sockets = Path("/proc/net/unix").read_text()
    listening = re.findall(r":([0-9A-F]{4}) 00000000:0000 0A", Path("/proc/net/tcp").read_text())
    assert [name for name, _ in names if name in sockets] == []
    assert [port for _, port in names if f"{int(port):04X}" in listening] == []
    new = [name for name in set(os.listdir("/dev/shm")) - shared if "pipeline" in name]
    assert new == []


def judge(case, outcome, ranks=4, call="train_step", action=None):
    who, kind = case["who"], case["trouble"]
    assert outcome.code != 0
    survivors = set(range(ranks)) - {who}
    assert survivors <= set(outcome.raised), outcome.printed
    for rank in survivors:
        seconds, text = outcome.raised[rank]
        assert text.startswith(("CommunicationError: ", "CommunicationTimeout: ")), text
        wanted = WHY[kind].format(who=who, call=call)
        # Of a stopped rank the others learn by their own limit, or from who reached it first.
        assert re.search(wanted, text), f"rank {rank}: {text}\n{outcome.printed}"
        assert seconds < (TIMEOUT + 6 if kind == "stop" else 5), outcome.raised
        assert rank_has_said_so(rank, outcome.printed)
    if action is not None:
        assert any(re.search(action, outcome.raised[r][1]) for r in survivors), outcome.raised
    # The launcher gives a process five seconds, a stopped one twice, before it kills it.
    assert outcome.seconds < (TIMEOUT + 30 if kind == "stop" else 25), outcome.printed


def rank_has_said_so(rank, printed):
    """Whether a rank's error came out in full, before the launcher ended it."""
    return re.search(rf"\[{rank}\]<stderr>:(pipeline\.errors\.|pipeline: rank {rank}: )", printed)


# Where trouble begins, the rank that is in it, and what else the case needs.
BPIPE = [
    ("forward", 1, {}),
    ("backward", 2, {}),
    ("send", 1, {}),
    ("receive", 2, {}),
    ("evict", 0, {}),
    ("load", 0, {}),
    ("accept", 3, {}),
    ("return", 3, {}),
    ("exchange", 2, {}),
]
REPLICAS = {"options": {"num_stages": 2, "schedule": "1f1b"}}
OTHERS = [
    ("reduce", 1, REPLICAS),
    ("optimizer", 3, REPLICAS),
    ("optimizer", 1, {}),
    ("between", 2, {}),
    ("build", 2, {}),
]
OVER_HOROVOD = [
    ("forward", 2, {}),
    ("send", 1, {}),
    ("receive", 2, {}),
    ("evict", 0, {}),
    ("load", 0, {}),
    ("accept", 3, {}),
    ("exchange", 2, {}),
    ("reduce", 1, REPLICAS),
    ("optimizer", 1, {}),
]
SAVES = [
    ("checkpoint", 1, {}),
    ("commit", 0, {}),
    ("checkpoint", 2, {"options": {"transport": "horovod"}}),
]


def cases():
    for kind in ("raise", "kill", "stop"):
        for at, who, more in BPIPE + OTHERS:
            yield kind, at, who, more, at in ("exchange", "build", "optimizer", "between", "reduce")
    for kind in ("interrupt", "exit"):
        for at, who in (("forward", 1), ("load", 0)):
            yield kind, at, who, {}, False
    for kind in ("raise", "kill", "stop", "interrupt"):
        for at, who, more in OVER_HOROVOD:
            more = {"options": {**more.get("options", {}), "transport": "horovod"}}
            yield kind, at, who, more, at in ("exchange", "optimizer", "reduce")
    for kind in ("kill", "stop"):
        yield kind, "receive", 3, {"options": {"transport": "tcp"}}, False
        yield kind, "forward", 0, {}, False
        yield kind, "weight", 1, {"options": {"schedule": "v-half"}}, False
        yield kind, "backward", 2, {"options": {"stash": "recompute"}}, False
        yield kind, "forward", 2, REPLICAS, False
    yield "interrupt", "reduce", 0, REPLICAS, True


# The sample of the plain run, by name.
PLAIN = {"kill-load-0", "raise-receive-2-horovod"}


def parameters():
    for kind, at, who, more, is_apart in cases():
        name = "-".join([kind, at, str(who), *map(str, more.get("options", {}).values())])
        marks = [] if name in PLAIN else [pytest.mark.full]
        yield pytest.param(kind, at, who, more, is_apart, id=name, marks=marks)


@pytest.mark.parametrize(("kind", "at", "who", "more", "is_apart"), list(parameters()))
def test_every_survivor_raises_what_happened(kind, at, who, more, is_apart):
    """`is_apart`: what the others wait for then is no action of the schedule."""
    case = {"trouble": kind, "at": at, "who": who, **more}
    call = "train_step"
    if at == "between":
        WHY_BETWEEN = {"raise": f"rank {who} ended by ArithmeticError"}
        wanted = WHY_BETWEEN.get(kind)
        outcome = run(case)
        if wanted:
            assert wanted in outcome.printed
            assert set(range(4)) - {who} <= set(outcome.raised)
            assert outcome.code != 0
            return
        judge(case, outcome)
        return
    judge(case, run(case), call=call, action=None if is_apart else ACTION)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["raise", "kill", "stop"])
@pytest.mark.parametrize(("at", "who", "more"), SAVES)
def test_trouble_in_a_save_leaves_the_one_before(kind, at, who, more, tmp_path):
    folder = tmp_path / "saved"
    case = {"trouble": kind, "at": at, "who": who, "save": str(folder), **more}
    judge(case, run(case), call="save")
    from pipeline.runtime.checkpoint import Reader

    reader = Reader(folder)
    assert reader.progress.steps == 2
    assert [reader._folder.read(name) is None for name in reader._folder.entries]


@pytest.mark.full
@pytest.mark.parametrize(("shape", "who"), [("features", 0), ("samples", 3), ("samples", 1)])
def test_another_shape_on_one_rank(shape, who):
    outcome = run({"trouble": "shape", "shape": shape, "who": who})
    assert outcome.code != 0 and set(outcome.raised) == {0, 1, 2, 3}
    for rank, (seconds, text) in outcome.raised.items():
        assert seconds < TIMEOUT + 6
        if rank != who:
            assert text.startswith(("Communication", "BatchError"))


@pytest.mark.full
def test_interrupting_the_launcher_ends_all():
    outcome = run({"trouble": "none", "who": -1, "also": "sleep"}, interrupt_launcher=True)
    assert outcome.code != 0 and outcome.seconds < 12
    for rank in range(4):
        assert f"[{rank}]<stderr>:pipeline: rank {rank}: SIGTERM" in outcome.printed
