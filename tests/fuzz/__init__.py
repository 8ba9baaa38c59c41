"""Differential fuzzer: random eager programs, run eagerly and co-executed, compared bit for bit.

A program is Python source text, made by `generator` from the tables of `grammar` and a seed: a step
function with helpers, branches, loops, reads, prints, effects, exceptions, random draws, tapes and
optimizers over the variables and Python objects of a `state.State`. It is a program in the sense of
`differential`, whose harness runs it twice from equal state and compares values, printed text,
variables, optimizer slots, Python state, exceptions and random streams. `campaign` runs many of
them in a child process, which may crash or hang; `minimiser` cuts a program that differs down to
the statements that matter.

    tools/fuzz                              # 200 programs, seeds 0 to 199
    tools/fuzz --first 1000 --count 500
    tools/fuzz --seed 17 --iterations 30    # one program; minimised where it differs
    tools/fuzz --seed 17 --show             # print it and run nothing
    tools/fuzz --file program.py            # a program that was printed before
    tools/fuzz --candidate eager            # eager against eager: the fuzzer's own faults

What a run finds goes into `differential/programs/` in small form, as a row of that table. To widen
the search, add lines to `grammar`.
"""
