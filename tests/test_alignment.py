"""Which nodes of a trace are there already: identities, and the alignment over them."""

import random

import pytest
import tensorflow as tf

from terra_tf import native
from terra_tf.runners.python_runner import initialise
from terra_tf.tracegraph import alignment
from terra_tf.tracegraph.alignment import align
from terra_tf.tracegraph.identity import identify
from terra_tf.tracing.recorder import Recorder
from terra_tf.tracing.trace import Call, Identity, Node, Result

pytestmark = pytest.mark.timeout(60)


# ---------------------------------------------------------------- identities


def recorded(function, *arguments):
    """The nodes of one call, with identities; which the place of this call is part of, too."""
    initialise()
    recorder = Recorder([x for x in arguments if isinstance(x, tf.Tensor)])
    recorder.start()
    try:
        function(*arguments)
        trace = recorder.finish()
    finally:
        native.core.leave()
    identify(trace)
    return trace.nodes


def identities(nodes, op):
    return [node.identity for node in nodes if node.op == op and not node.misses]


def test_nodes_of_the_same_line_are_the_same_in_every_trace():
    def step(x):
        y = tf.exp(x)
        return tf.exp(y) + 1.0

    one, other = (recorded(step, tf.constant(value)) for value in (1.0, 2.0))
    assert [node.identity for node in one] == [node.identity for node in other]
    first, second = identities(one, "Exp")
    assert first.family != second.family


def test_turns_of_a_loop_are_one_family_and_counted():
    def step(x, turns):
        for _ in range(turns):
            x = tf.exp(x)

    short, long = (identities(recorded(step, tf.ones([2]), n), "Exp") for n in (2, 4))
    assert len({identity.family for identity in long}) == 1
    assert len({identity.exact for identity in long}) == 4
    assert long[:2] == short


def test_ops_of_a_loop_over_variables_are_told_apart_by_the_variable():
    layers = [tf.Variable(tf.ones([2, 2])) for _ in range(3)]

    def step(x, chosen):
        for k in chosen:
            x = tf.nn.relu(x @ layers[k])

    every, some, one = (
        [identity.exact for identity in identities(recorded(step, tf.ones([2, 2]), k), "Relu")]
        for k in (range(3), [0, 2], [2])
    )
    assert len(set(every)) == 3
    assert some == [every[0], every[2]]
    assert one == [every[2]]


def test_what_is_computed_for_an_update_belongs_to_the_updated_variable():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def step(gradients, chosen):
        for k in chosen:
            variables[k].assign_sub(0.5 * gradients[k])

    gradients = [tf.constant(1.0), tf.constant(2.0)]
    both, one = (identities(recorded(step, gradients, k), "Mul") for k in ([0, 1], [1]))
    assert one[0].exact == both[1].exact != both[0].exact


def test_backward_ops_belong_to_their_forward_ops():
    def step(x, branch):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x)
            if branch:
                y = y * tf.sin(y)
            loss = tf.reduce_sum(y)
        tape.gradient(loss, x)

    x = tf.ones([2])
    without, having = (identities(recorded(step, x, taken), "Cos") for taken in (False, True))
    assert len(without) == 1 and len(having) == 2
    assert without[0].exact == having[1].exact != having[0].exact


# ---------------------------------------------------------------- alignments


def line(text):
    """Nodes by name: a letter for the context, maybe followed by which of that context it is."""
    return [
        Node(name, Call.FAST_PATH, (), (), (), 0, 0, Result.NONE, identity=identity(name))
        for name in text.split()
    ]


def identity(name):
    return Identity(hash(name[0]), hash(name[0]), hash(name))


def aligned(merged, nodes, known=(), shareable=lambda a, b: True):
    return align(line(merged), line(nodes), known, shareable)


def test_equal_traces_are_aligned_node_by_node():
    assert aligned("a b c", "a b c") == [0, 1, 2]
    assert aligned("", "") == []


def test_a_trace_may_skip_and_add_nodes():
    assert aligned("a b c d", "a d") == [0, 3]
    assert aligned("a d", "a b c d") == [0, None, None, 1]
    assert aligned("a b d", "a c d") == [0, None, 2]
    assert aligned("a b", "a b c") == [0, 1, None]
    assert aligned("", "a") == [None]


def test_moved_nodes_are_aligned_in_ascending_order():
    assert aligned("a b c d e", "d a b c e") == [None, 0, 1, 2, 4]


def test_gaps_are_aligned_by_context():
    """Turns of a loop that are counted otherwise, since an earlier one was skipped."""
    assert aligned("a x1 b", "a x2 b") == [0, 1, 2]
    assert aligned("a x2 y2 b x3 c", "a x7 y9 x8 b c") == [0, 1, 2, None, 3, 5]


def test_what_a_walk_has_matched_stays():
    assert aligned("a a b", "a b", known=[1]) == [1, 2]
    assert aligned("a b c b", "a b c", known=[0, 3]) == [0, 3, None]


def test_nodes_that_cannot_stand_for_each_other_are_new():
    def shareable(a, b):
        return a.op != "b"

    assert aligned("a b c", "a b c", shareable=shareable) == [0, None, 2]


def test_gaps_that_are_too_large_are_left_alone(monkeypatch):
    monkeypatch.setattr(alignment, "_LARGEST_GAP", 3)
    assert aligned("a x1 x2 b", "a x3 x4 b") == [0, None, None, 3]
    assert aligned("a x1 x2 b", "a x3 b")[1] in (1, 2)


def longest_common(a, b):
    """Length of the longest common subsequence, by the textbook's recurrence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = (
                table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
            )
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(60))
def test_alignments_ascend_and_are_as_long_as_can_be(seed):
    rng = random.Random(seed)
    exact = [f"{rng.choice('abc')}{k}" for k in range(12)]  # each name at most once in a trace
    merged, nodes = (rng.sample(exact, rng.randint(0, 12)) for _ in range(2))
    found = aligned(" ".join(merged), " ".join(nodes))
    pairs = [(t, m) for t, m in enumerate(found) if m is not None]
    assert [m for _, m in pairs] == sorted({m for _, m in pairs})
    assert all(nodes[t][0] == merged[m][0] for t, m in pairs)
    same = sum(nodes[t] == merged[m] for t, m in pairs)
    assert same >= longest_common(merged, nodes)


@pytest.mark.parametrize("seed", range(30))
def test_gaps_are_aligned_as_long_as_can_be(seed):
    rng = random.Random(seed)
    merged, nodes = ("".join(rng.choices("abc", k=rng.randint(0, 9))) for _ in range(2))
    found = aligned(
        " ".join(f"{x}{k}" for k, x in enumerate(merged)),
        " ".join(f"{x}{k + 100}" for k, x in enumerate(nodes)),
    )
    pairs = [(t, m) for t, m in enumerate(found) if m is not None]
    assert [m for _, m in pairs] == sorted({m for _, m in pairs})
    assert all(nodes[t] == merged[m] for t, m in pairs)
    assert len(pairs) == longest_common(merged, nodes)
