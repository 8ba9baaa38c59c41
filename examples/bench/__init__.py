"""The benchmark: the ten programs of the paper and five micro programs, each in several modes.

    tools/bench            # sets up what is needed, then runs all of them
    tools/bench --help     # fewer programs, modes or rounds; memory; comparison with an earlier run

`programs` lists the programs, `modes` what is done with a step, `measure` trains and times,
`isolated` measures memory in processes of their own, `agreement` compares results with eager's,
`results` is what a run comes to and its JSON, which `table`, `chart` and `comparison` show.
"""
