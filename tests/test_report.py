"""What is told about steps: history, findings, text, page, timeline, logging, TensorBoard."""

import json
import logging
import re
import time
import xml.etree.ElementTree as xml

import pytest
import tensorflow as tf

import terra_tf as terra
from terra_tf import api
from terra_tf.report import log, page
from terra_tf.report.counters import stats_of
from terra_tf.report.findings import report_of

weight = tf.Variable(tf.ones([64, 64]))


def branching(x, turn):
    y = tf.matmul(x, weight)
    if turn % 3 == 1:
        y = tf.sin(y)
    if turn > 20 and turn % 2:
        y += tf.random.uniform([64, 64], seed=3)  # runs in place
    weight.assign_add(tf.reduce_mean(y) * tf.ones_like(weight) * 1e-4)
    if turn % 5 == 0:
        float(tf.reduce_sum(y))
    return y


@pytest.fixture(scope="module")
def step():
    step = terra.function(branching, name="branching")
    for turn in range(60):
        result = step(tf.random.normal([64, 64]), turn)
        if turn > 30:
            result.numpy()
    terra.sync()
    return step


def report(step):
    region = step._region
    return report_of(region.runner, stats_of([region.source]))


def test_fallbacks_name_both_lines(step):
    report_ = report(step)
    assert report_.fallbacks
    for fallback in report_.fallbacks:
        if fallback.code == "new-op":
            assert "test_report.py:" in fallback.expected_text + fallback.actual_text
    text = terra.explain(step)
    assert re.search(r"\d+ x new-op at \S*test_report.py:\d+ in branching", text)
    assert "expected" in text
    assert "hint:" in text


def test_waits_have_a_line_and_a_cost():
    slow = tf.Variable(tf.ones([700, 700]))

    @terra.function(name="slow")
    def step(x):
        y = tf.matmul(tf.matmul(tf.matmul(x, slow), slow), slow) * 1e-3
        float(tf.reduce_sum(y))  # inside
        return tf.matmul(y, slow)

    for _ in range(8):
        float(step(tf.ones([700, 700]))[0, 0])  # after
    found = {read.inside: read for read in report(step).reads}
    assert "in step" in found[True].place
    assert found[True].waits >= 5
    assert found[True].per_iteration > 0.05
    assert "in test_waits_have_a_line_and_a_cost" in found[False].place
    text = terra.explain(step)
    assert re.search(r"move the read at \S*test_report.py:\d+ in step out of the step: saves", text)
    assert "ms per step" in text


def test_drawing_counts_every_way(step):
    drawing = report(step).drawings[0]
    optional = [block for block in drawing.blocks if block.optional]
    sines = [b for b in optional if any("Sin" in row.ops for row in b.rows)]
    assert sines
    for block in drawing.blocks:
        if not block.optional:
            assert block.skipped == 0
    runs = step.stats().coexecuted
    taken = sum(block.taken for block in sines)
    assert 0 < taken < runs + step.stats().traced + step.stats().fallen_back
    assert all(block.skipped > taken / 4 for block in sines)
    rows = [row for block in drawing.blocks for row in block.rows]
    assert any(row.feeds for row in rows)
    assert any(row.fetches for row in rows)
    assert any(row.in_place for row in rows)
    assert any(row.writes and "assign_add" in row.source for row in rows)
    assert "branching" in str(drawing)


def test_page_stands_alone_and_is_well_formed(step):
    text = page.html_page(api.report_program("terra explain <test>", 3.0))
    assert "terra explain &lt;test&gt;" in text
    assert not re.search(r"(src|href)=|<script|@import|url\(", text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        xml.fromstring(svg)
    body = text[text.index("<body>") : text.index("</body>") + len("</body>")]
    xml.fromstring(body.replace("<details open>", "<details>"))
    for piece in ("taken ", "skipped ", "feed", "fetch", "GraphRunner", "PythonRunner", "new-op"):
        assert piece in text, piece


def test_timeline_has_both_runners_in_order(step, tmp_path):
    path = tmp_path / "trace.json"
    before = time.perf_counter() * 1e6
    terra.timeline(step, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {(event["cat"], event["name"]) for event in complete}
    assert ("PythonRunner", "coexecuted") in names
    assert ("PythonRunner", "traced") in names
    assert ("PythonRunner", "generates a graph") in names
    assert ("GraphRunner", "graph") in names
    assert any(name.endswith("fell back") for _, name in names)
    for event in complete:
        assert event["dur"] >= 0
        assert event["ts"] + event["dur"] <= before
    iterations = [e for e in complete if e["cat"] == "PythonRunner" and "e" in e["name"][:2]]
    assert [e["ts"] for e in iterations] == sorted(e["ts"] for e in iterations)
    graphs = [e for e in complete if e["name"] == "graph"]
    for one, two in zip(graphs, graphs[1:], strict=False):
        assert one["ts"] + one["dur"] <= two["ts"] + 1  # one GraphRunner runs one graph at a time
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {
        "PythonRunner",
        "GraphRunner",
    }


def test_history_is_bounded():
    step = terra.function(lambda x: x + 1.0)
    for turn in range(600):
        step(tf.constant(float(turn)))
    assert len(step._region.runner.history.records) <= 256


def test_topics_are_loggers_and_say_each_cause_once(caplog):
    flip = tf.Variable(0.0)

    @terra.function(name="flipping")
    def step(x, other):
        return flip.assign_add(tf.sin(x) if other else tf.cos(x))

    with caplog.at_level(logging.INFO, "terra_tf"):
        for turn in range(30):
            step(tf.constant(1.0), turn in (10, 11, 20))
    told = [r for r in caplog.records if "flipping" in r.getMessage()]
    topics = {record.name for record in told}
    assert (
        {"terra_tf.fallback", "terra_tf.graphs"} <= topics <= {f"terra_tf.{t}" for t in log.TOPICS}
    )
    causes = [r.getMessage() for r in told if r.name == "terra_tf.fallback"]
    assert len(causes) == len(set(causes))


def test_environment_sends_topics_to_standard_error(capsys):
    loggers = {name: logging.getLogger(f"terra_tf.{name}") for name in log.TOPICS}
    kept = {name: (x.level, x.handlers[:], x.propagate) for name, x in loggers.items()}
    try:
        log.listen("fallback, nonsense")
        log.topic("fallback").info("left at %s", "here")
        log.topic("graphs").info("not asked for")
    finally:
        for name, (level, handlers, propagate) in kept.items():
            loggers[name].level, loggers[name].propagate = level, propagate
            loggers[name].handlers[:] = handlers
    errors = capsys.readouterr().err
    assert "terra_tf.fallback: left at here\n" in errors
    assert "not asked for" not in errors
    assert "TERRA_LOG has no topic 'nonsense'" in errors


def scalars(folder):
    """Tag -> values of all event files."""
    found = {}
    for file in folder.glob("*"):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor).item()
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_tensorboard_gets_what_was_added(tmp_path):
    step = terra.function(lambda x: x * 2.0)
    writer = terra.tensorboard.Writer(str(tmp_path), step)
    for epoch in range(2):
        for turn in range(7):
            step(tf.constant(float(turn)))
        writer.write(epoch)
    writer.close()
    found = scalars(tmp_path)
    assert sum(value for _, value in found["terra/coexecuted"]) == step.stats().coexecuted
    assert found["terra/coexecuted"][1] == (1, 7.0)
    assert found["terra/coexecuted_share"][1] == (1, 1.0)
    assert found["terra/graphs"][1] == (1, 0.0)
