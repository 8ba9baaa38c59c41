"""Five small training programs, each timed in three modes: eager, Terra and `tf.function`.

    tools/bench            # sets up what is needed, then runs all five
    tools/bench --help     # fewer programs, other numbers of steps, a table in a file

`programs` holds the programs, `measure` trains and times them, `agreement` compares the results of
the modes, `table` writes it all down.
"""
