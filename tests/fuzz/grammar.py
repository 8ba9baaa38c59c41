"""What fuzzed programs consist of: tables of expressions and statements, to which lines are added.

A text holds placeholders, which `generator` fills in:

    $rows $vec ...   an expression of that type
    $new:vec         a new name; the template makes it a value of that type
    $old:vec         a name of that type that exists already and is given another value
    $1 $2            the first, second name of `$new:` and `$old:` in the same template
    $block $body     statements; in `$body`, of a loop, `break` and `continue` may occur
    $risky           statements that may raise what the template catches
    $result          what the function in progress returns
    $p $c $n         literals: a probability, a small float, a number from 0 to 4

The types: `batch` (rows, exactly as many as the step's argument x has), `rows` (float32, any number
of them), `vec` (float32, [4]), `num` (float32 scalar), `ids` (int32, any number of row numbers of
the embedding table), `int` (int32 scalar), `list` (of vectors); of Python: `pyint` (0 to 6),
`pyfloat`, `cond` (a bool), `tape`, `text`.

Every expression is total: no op in it can fail for any values of its operands, and what a program
keeps from step to step stays finite, so that programs fail only where they are meant to.
"""

# Type -> expressions that take no other ones.
LEAVES = {
    "batch": ["x"],
    "rows": ["x", "s.previous", "s.table.read_value()", "tf.random.normal([2, 4])"],
    "vec": ["s.bias", "s.memory", "random.choice(s.experts)", "tf.constant([0.5, -1.0, 2.0, $c])"],
    "num": ["s.total", "tf.constant($c)", "tf.random.uniform([])"],
    "ids": ["tf.constant([0, 3, 3])", "tf.constant(np.random.randint(0, 6, size=3), tf.int32)"],
    "int": ["s.count", "tf.constant($n)", "tf.random.uniform([], maxval=5, dtype=tf.int32)"],
    "list": ["list(s.kept)", "[s.bias, s.memory]", "list(s.named.values())"],
    "pyint": [
        "$n",
        "s.turn % 5",
        "random.randint(0, 4)",
        "len(s.kept)",
        "int(np.random.randint(4))",
    ],
    "pyfloat": ["$c", "s.rate", "random.random()", "np.random.rand()", "0.1 * s.turn"],
    "cond": ["random.random() < $p", "s.turn % 2 == 0", "s.turn % 3 == 1", "s.flag", "s.turn > 5"],
}

# Type -> what decides nothing or next to nothing anew from step to step.
STEADY = {
    "pyint": ["0", "1", "2", "3", "4", "len(x) % 4"],
    "cond": ["True", "False", "s.turn > 5", "s.turn == 7", "s.turn % 6 == 5", "len(x) > 4"],
}

# Type -> expressions.
EXPRESSIONS = {
    "batch": [
        "tf.tanh($batch)",
        "tf.sin($batch)",
        "tf.nn.relu($batch @ s.weights + s.bias)",
        "tf.matmul($batch, s.weights)",
        "($batch + $vec)",
        "($batch * $num)",
        "($batch * $pyfloat)",
        "($batch - $batch)",
        "tf.where($batch > $c, $batch, $batch * $c)",
        "tf.reverse($batch, [0])",
        "tf.sort($batch, axis=1)",
        "tf.concat([($batch)[:, 2:], ($batch)[:, :2]], axis=1)",
        "tf.nn.softmax($batch)",
        "tf.nn.dropout($batch, rate=0.25)",
        "tf.random.uniform(tf.shape($batch))",
        "tf.random.normal(($batch).shape, seed=2)",
        "tf.cumsum($batch)",
        "tf.map_fn(tf.sin, $batch)",
        "s.compiled($batch)",
        "s.noisy($batch)",
        "s.dense($batch)",
        "s.norm($batch, training=$cond)",
        "s.dropout($batch, training=True)",
        "tf.numpy_function(lambda a: a * np.float32(0.5), [$batch], tf.float32)",
        "tf.ensure_shape($batch, [None, 4])",
        "tf.reshape($batch, [len($batch), 4])",
        "tf.stop_gradient($batch)",
        "random.choice([$batch, $batch])",
        "($batch if $cond else $batch)",
    ],
    "rows": [
        "$batch",
        "$batch",
        "tf.boolean_mask($batch, ($batch)[:, 0] > $c)",
        "tf.gather($batch, tf.where(($batch)[:, 1] > $c)[:, 0])",
        "tf.gather($batch, tf.image.non_max_suppression($batch, tf.reduce_sum($batch, 1), 3))",
        "tf.RaggedTensor.from_tensor(($rows)[tf.newaxis])[0]",
        "tf.concat([$rows, $rows], 0)[:12]",
        "($rows)[:$pyint]",
        "($rows)[$pyint:]",
        "($rows)[::2]",
        "tf.tanh($rows)",
        "($rows + $vec)",
        "($rows @ s.weights)",
        "tf.gather(s.table, $ids)",
        "tf.nn.embedding_lookup(s.table, $ids)",
        "tf.stack([$vec, $vec])",
        "tf.stack([$vec, *$list])",
        "tf.repeat($rows, 2, axis=0)[:8]",
        "tf.random.uniform([$pyint, 4])",
        "tf.random.shuffle($rows)",
        "tf.sort($rows, axis=0)",
        "tf.cond($num > $c, lambda: $rows, lambda: $rows)",
        "random.choice([$rows, $rows])",
    ],
    "vec": [
        "tf.reduce_sum($rows, axis=0)",
        "tf.math.divide_no_nan(tf.reduce_sum($rows, 0), tf.cast(len($rows), tf.float32))",
        "tf.reduce_sum(($rows)[:1], 0)",
        "tf.tanh(tf.reduce_max($rows, axis=0))",
        "tf.math.unsorted_segment_sum($num, $int % 4, 4)",
        "tf.linalg.matvec(s.weights, $vec)",
        "($vec * $num)",
        "($vec + $vec)",
        "($vec - $pyfloat)",
        "(-$vec)",
        "tf.sin($vec)",
        "tf.nn.softmax($vec)",
        "tf.roll($vec, $pyint, 0)",
        "tf.sigmoid($vec) * np.float32($pyfloat)",
        "tf.fill([4], $num)",
        "tf.one_hot($int, 4)",
        "tf.random.uniform([4])",
        "tf.random.normal([4], seed=1)",
        "tf.random.uniform([4], seed=3)",
        "tf.random.truncated_normal([4])",
        "s.generator.normal([4])",
        "s.generator.uniform([4])",
        "tf.constant(np.random.randn(4).astype(np.float32))",
        "tf.constant([random.gauss(0.0, 1.0) for _ in range(4)])",
        "random.choice([$vec, $vec, $vec])",
        "[$vec, $vec][$pyint % 2]",
        "random.choice([$vec, *$list])",
        "tf.add_n([$vec, *$list])",
        "sum($list, $vec)",
        "s.experts[$pyint % 3]",
        "s.named.get($pyint, $vec)",
        "next(s.iterator)",
        "tf.py_function(lambda a: a * 2.0 + s.turn, [$vec], tf.float32)",
        "s.compiled_update($vec)",
        "s.noisy($vec)",
        "tf.while_loop(lambda i, v: i < $pyint, lambda i, v: (i + 1, tf.sin(v)), [0, $vec])[1]",
        "tf.scan(lambda a, b: 0.5 * a + b, $batch)[0]",
        "tf.switch_case($int % 2, [lambda: $vec, lambda: $vec])",
        "s.weights[$pyint % 4]",
        "tf.reshape(tf.reshape($vec, [2, 2]), [-1])",
        "tf.TensorArray(tf.float32, 2).write(0, $vec).write(1, $vec).stack()[$pyint % 2]",
        "tf.sparse.to_dense(tf.sparse.from_dense($vec))",
        "tf.einsum('ij,i->j', s.weights, $vec)",
    ],
    "num": [
        "tf.reduce_sum($rows)",
        "tf.reduce_mean($batch)",
        "tf.reduce_sum($vec * $vec)",
        "tf.reduce_max($vec)",
        "($vec)[$pyint % 4]",
        "tf.norm($vec + 0.1)",
        "($num * $num)",
        "($num + $pyfloat)",
        "tf.tanh($num)",
        "tf.abs($num)",
        "tf.minimum($num, $num)",
        "tf.tensordot($vec, $vec, 1)",
        "tf.cast($int, tf.float32)",
        "tf.reduce_logsumexp($vec)",
        "s.total.read_value()",
        "s.metric.result()",
        "tf.random.uniform([], -1.0, 1.0)",
        "tf.constant($pyfloat)",
        "tf.constant(float($num))",
        "max($num, $num)",
    ],
    "ids": [
        "tf.unique($ids)[0]",
        "tf.concat([$ids, $ids], 0)[:8]",
        "tf.range($pyint)",
        "tf.cast(tf.where(($batch)[:, 0] > $c)[:, 0] % 6, tf.int32)",
        "(($ids + $int) % 6)",
        "tf.sort($ids)",
        "tf.constant([$pyint % 6, 1])",
        "tf.argsort(($batch)[:, 0])[:6] % 6",
    ],
    "int": [
        "tf.shape($rows)[0]",
        "tf.size($ids)",
        "tf.cast(tf.argmax($vec), tf.int32)",
        "tf.math.count_nonzero($vec > $c, dtype=tf.int32)",
        "($int + $pyint)",
        "tf.reduce_sum($ids)",
        "tf.constant($pyint)",
    ],
    "list": [
        "[$vec, $vec]",
        "[$vec for _ in range($pyint)]",
        "[v * $c for v in $list]",
        "tf.unstack(tf.stack([$vec, $vec]))",
        "list($rows)",
        "sorted($list, key=lambda v: float(v[0]))",
        "$list[::-1]",
    ],
    "pyint": [
        "int($int) % 5",
        "len($rows) % 5",
        "($rows).shape[0] % 4",
        "int(tf.argmax($vec))",
        "len($list) % 5",
        "($pyint + 1) % 5",
        "($batch).shape.as_list()[0] % 5",
        "round(abs(float(tf.tanh($num))) * 4)",
    ],
    "pyfloat": [
        "float(tf.tanh($num))",
        "tf.sin($num).numpy()",
        "float(np.asarray(tf.tanh($vec)).mean())",
        "tf.tanh($num).numpy().item()",
    ],
    "cond": [
        "$num > $c",
        "bool($num < $num)",
        "float($num) > $c",
        "($vec).numpy()[0] > $c",
        "tf.reduce_any($vec > $c)",
        "len(s.kept) > $n",
        "len($rows) > 2",
        "($rows).shape[0] % 2 == 0",
        "$pyint == $pyint",
        "not ($cond)",
        "($cond and $cond)",
        "($cond or $cond)",
        "np.allclose($vec, $vec)",
        "int($int) % 2 == 0",
        "random.random() < $p",
        "random.random() < $p",
        "s.turn % (2 + $n) == 1",
    ],
    "text": [
        "s.turn",
        "len(s.kept)",
        "$num",
        "$vec",
        "($rows).shape",
        "float($num)",
        "f'{$num + 0.0:.5f}'",
        "($vec).numpy().tolist()",
        "$pyint",
        "($rows).dtype.name",
        "tf.strings.as_string($int)",
    ],
    "result": [
        "$num",
        "$vec",
        "$rows",
        "($num, $vec)",
        "[$rows, {'turn': s.turn, 'int': $int}]",
        "($pyint, $pyfloat, $num)",
        "$list",
        "None",
    ],
}

# Statements without others inside: weight, text.
SIMPLE = [
    (4, "$new:batch = $batch"),
    (3, "$new:rows = $rows"),
    (4, "$new:vec = $vec"),
    (3, "$new:num = $num"),
    (1, "$new:list = $list"),
    (1, "$new:pyint = $pyint"),
    (3, "$old:batch = $batch"),
    (3, "$old:rows = $rows"),
    (5, "$old:vec = $vec"),
    (3, "$old:num = $num"),
    (1, "$old:vec = $1 + $vec"),
    (1, "$old:list.append($vec)"),
    (1, "$old:list = [*$list, $vec][-5:]"),
    # Writes to variables.
    (2, "s.bias.assign(tf.tanh($vec))"),
    (1, "s.weights.assign(tf.tanh(s.weights + $vec))"),
    (2, "s.weights.assign_add(0.01 * tf.tanh(s.weights * $vec))"),
    (2, "s.experts[$pyint % 3].assign_sub(0.1 * tf.tanh($vec))"),
    (2, "s.total.assign(tf.tanh($num))"),
    (1, "s.total.assign_add(0.1)"),
    (1, "s.count.assign_add($pyint)"),
    (1, "s.count.assign($int % 7)"),
    (1, "s.table.scatter_nd_update([[$pyint % 6]], [tf.tanh($vec)])"),
    (1, "s.table[$pyint % 6].assign(tf.tanh($vec))"),
    (1, "s.metric.update_state(tf.tanh($num))"),
    (1, "s.generator.skip(1)"),
    (1, "s.dense.set_weights([array * 0.5 for array in s.dense.get_weights()])"),
    (1, "s.weights = tf.Variable(s.weights * 0.5) if $cond else s.weights"),
    # Python state.
    (2, "s.log.append(float($num))"),
    (1, "s.events.append(($rows).shape.as_list())"),
    (1, "s.events.append(($vec).numpy().tolist())"),
    (1, "s.flag = $cond"),
    (1, "s.rate = 0.05 + 0.1 * random.random()"),
    (2, "s.memory = tf.tanh($vec)"),
    (2, "s.previous = tf.tanh($rows)[:6]"),
    (2, "s.keep(tf.sin($vec))"),
    (1, "s.kept.clear()"),
    (1, "s.kept = s.kept[1:]"),
    (2, "s.named[$pyint] = tf.tanh($vec)"),
    (1, "s.named.pop($pyint, None)"),
    # Printed text.
    (2, "print($text, $text)"),
    (1, "tf.print('from TensorFlow', $num, $vec, output_stream=sys.stdout)"),
    # Variables made in the step.
    (1, "$new:vec = tf.Variable($vec).assign_add($vec) * $c"),
]

# Statements with others inside: weight, text.
COMPOUND = [
    (5, "if $cond:\n    $block"),
    (5, "if $cond:\n    $block\nelse:\n    $block"),
    (2, "if $cond:\n    $block\nelif $cond:\n    $block\nelse:\n    $block"),
    (1, "if $cond:\n    $old:vec = $vec\nelse:\n    $1 = $vec"),
    (1, "with terra.disable():\n    $block"),
    (1, "with s.section('outer'):\n    $block"),
    (2, "try:\n    $risky\n    $block\nexcept $errors as error:\n    $handler\n    $block"),
    (
        2,
        "try:\n    $block\n    $risky\nexcept $errors as error:\n    $handler\n"
        "else:\n    $block\nfinally:\n    s.events.append('finally')\n    $block",
    ),
    (
        4,
        "with tf.GradientTape() as $new:tape:\n    $block\n    $new:num = $num\n"
        "s.descend($1.gradient($2, s.trainable))",
    ),
    (
        3,
        "with tf.GradientTape() as $new:tape:\n    $block\n    $new:num = $num\n"
        "s.apply($1.gradient($2, s.trainable))",
    ),
    (
        2,
        "with tf.GradientTape(persistent=True) as $new:tape:\n    $1.watch(x)\n    $block\n"
        "    $new:num = $num\n    $new:num = $num\n$block\n"
        "$new:batch = $1.gradient($2, x, unconnected_gradients='zero')\n"
        "s.descend($1.gradient($3, s.trainable))\ndel $1",
    ),
    (
        1,
        "with tf.GradientTape() as $new:tape:\n    with tf.GradientTape() as $new:tape:\n"
        "        $block\n        $new:num = tf.reduce_sum(tf.tanh($batch @ s.weights) * $num)\n"
        "    $new:rows = $2.gradient($3, s.weights, unconnected_gradients='zero')\n"
        "    $new:num = tf.reduce_sum($4 * $4)\ns.descend($1.gradient($5, s.trainable))",
    ),
    (
        1,
        "with tf.GradientTape() as $new:tape:\n    $1.watch(s.bias)\n    $block\n"
        "    $new:vec = tf.tanh($vec * s.bias)\n"
        "$new:vec = tf.linalg.diag_part($1.jacobian($2, s.bias))",
    ),
    (
        1,
        "with tf.autodiff.ForwardAccumulator(s.bias, tf.ones([4])) as $new:tape:\n    $block\n"
        "    $new:vec = tf.tanh($vec * s.bias)\n$new:vec = $1.jvp($2)",
    ),
    (
        1,
        "with tf.GradientTape() as $new:tape:\n    $block\n    $new:num = $num\n"
        "$new:gradients, $new:num = tf.clip_by_global_norm($1.gradient($2, s.trainable), 1.0)\n"
        "s.descend($3)",
    ),
    (
        1,
        "with tf.GradientTape() as $new:tape:\n    $new:num = $num\n    with $1.stop_recording():\n"
        "        $block\n    $2 = $2 * $num\ns.descend($1.gradient($2, s.trainable))",
    ),
]

# Loops: weight, text. They nest at most two deep, and make at most six turns.
LOOPS = [
    (4, "for $new:pyint in range($pyint):\n    $body"),
    (3, "for _ in range($pyint):\n    $body\n    $old:vec = $vec"),
    (2, "for _ in range($pyint):\n    $old:batch = $batch\n    $body"),
    (1, "for $new:vec in list($rows)[:4]:\n    $body"),
    (1, "for $new:num in tf.unstack($vec):\n    $body"),
    (1, "for $new:pyint, $new:vec in enumerate($list[:5]):\n    $body"),
    (
        2,
        "$new:turns = 0\nwhile $num > $c and $1 < 5:\n    $1 += 1\n    $body",
    ),
    (
        1,
        "$new:turns = 0\nwhile True:\n    $1 += 1\n    if $cond or $1 > 4:\n        break\n"
        "    $body",
    ),
    (1, "for _ in range(3):\n    $body\nelse:\n    $block"),
]

# Statements that are possible in a loop's body only.
IN_LOOPS = [
    (1, "if $cond:\n    break"),
    (1, "if $cond:\n    continue"),
    (1, "if $cond:\n    $block\n    continue"),
]

# Statements that leave the function in progress.
LEAVING = [
    (3, "if $cond:\n    return $result"),
    (1, "if $cond:\n    $block\n    return $result"),
    (1, "if s.turn % 5 == 4 and $cond:\n    raise Planned(f'in step {s.turn}')"),
]

# What may fail by the values of its operands, in a `try`.
RISKY = [
    (2, "$old:vec = tf.gather($rows, $int)"),
    (1, "tf.debugging.assert_less($num, $c)"),
    (1, "tf.debugging.assert_equal(tf.shape($rows)[0], $int)"),
    (1, "$old:vec = tf.debugging.check_numerics($vec / $num, 'not finite')"),
    (1, "$old:rows = tf.reshape(tf.boolean_mask($batch, ($batch)[:, 0] > $c), [2, -1, 4])[0]"),
    (1, "s.count.assign(12 // $int)"),
    (1, "$old:vec = s.named[$pyint]"),
    (1, "if $cond:\n    raise Planned('caught')"),
    (1, "$old:rows = $rows + $rows"),
    (1, "$old:vec = tf.ensure_shape($rows, [2, 4])[0]"),
    (1, "s.bias.assign(tf.tanh(($rows)[$pyint]))"),
]
ERRORS = "(tf.errors.OpError, ValueError, KeyError, IndexError, Planned)"
HANDLERS = [
    "s.events.append(type(error).__name__)",
    "print('caught', type(error).__name__)",
    "s.total.assign_add(0.125)",
]

# Functions of a program besides its step: head, types of parameters, type it makes, last lines.
HELPERS = [
    ("def helper(x, v):\n    $block\n    return $vec", {"x": "batch", "v": "vec"}, "vec"),
    ("def block(x, v):\n    $block\n    return $batch", {"x": "batch", "v": "vec"}, "batch"),
    (
        "def descent(x, v, depth):\n    if depth <= 0:\n        return $vec\n    $block\n"
        "    return descent($batch, $vec, depth - 1)",
        {"x": "batch", "v": "vec"},
        "vec",
    ),
    (
        "def produce(x, v):\n    for _ in range($pyint):\n        $body\n        yield $vec",
        {"x": "batch", "v": "vec"},
        "list",
    ),
]
# Helper -> expressions that call it.
CALLS = {
    "helper": ("vec", "helper($batch, $vec)"),
    "block": ("batch", "block($batch, $vec)"),
    "descent": ("vec", "descent($batch, $vec, $pyint % 4)"),
    "produce": ("list", "list(produce($batch, $vec))"),
}

# What needs the state's Keras layers and optimizer.
KERAS = ("s.dense", "s.norm", "s.dropout", "s.metric", "s.apply")

# What a caller does between two steps.
BETWEEN = [
    "yield s.weights",
    "yield float(tf.reduce_sum(s.weights))",
    "print('between', s.total.numpy())",
    "s.bias.assign(s.bias * 0.5)",
    "s.rate *= 0.9",
    "yield tf.random.uniform([2])",
    "yield s.memory, s.previous",
    "yield list(s.kept)",
    "s.flag = not s.flag",
]
