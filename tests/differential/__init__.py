"""Differential tests: each program of a table runs twice, and both runs must agree bit for bit.

The first run is plain eager TensorFlow, the oracle. The second one is the same program under
`terra_tf`, from the same state and in the same process. Compared are the values that the program
yields (tensors, variables, models, optimizers, Python objects), the text that it prints, and what
every random stream gives afterwards; `terra_tf.stats()` then proves that the second run did
co-execute.

Adding a program is adding one generator function to a file in `programs/`:

    @program()
    def counted_steps(terra):
        \"\"\"A Python counter that the step increments.\"\"\"
        weights = tf.Variable(tf.ones([3]))
        calls = []

        @terra.function
        def step(x):
            calls.append(len(calls))
            weights.assign_add(x)
            return tf.reduce_sum(weights)

        for turn in range(terra.iterations):
            yield step(tf.fill([3], float(turn)))
        yield weights, calls

- `terra` stands for the package: it has `function`, `iterate`, `disable` and `sync`, which do
  nothing in the eager run, and `iterations`, the number of steps to make.
- Whatever is yielded is compared. Containers are copied and variables are read at the yield;
  tensors are read when the program is over, so that a yield makes nobody wait.
- Random streams (TensorFlow, Keras, NumPy, Python) are seeded before each run.
- The defaults of `@program` are those of a program with one op sequence: at least 8 of its 12
  iterations co-execute and none falls back. A row that differs says so: `coexecuted=`,
  `fallbacks=(least, most)`, `tolerance=` (for oneDNN's convolutions only), `keras="2"` for the
  legacy Keras, `keras="both"` for a program that runs with either through `tf.keras`.

Run one row, or a few, in the foreground, from the top of the checkout:

    python -m tests.differential raw_momentum
    python -m tests.differential raw_momentum gradient_maml --iterations 200 --read each
    python -m tests.differential --list

As a test: `pytest tests/differential -k raw_momentum`. With `-m full`, each row also runs eagerly
twice (`-k deterministic`; this needs no `terra_tf`), and co-executed with every yield read at once.

Where a plain step function and a few inputs say it all, `cases.case` makes a row of them. What
`tools/fuzz` finds becomes a row too.

The files: `table` (the decorator), `cases` (rows of plain step functions), `observation` (what a
value looks like to a user), `capture` (printed text), `harness` (one row, two runs, the verdict),
`worker` (rows in a process of their own, so that a crash or a hang costs one row), `training` (data
and steps that programs share).
"""
