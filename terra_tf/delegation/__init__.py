"""Delegated calls: the Python of known library calls is skipped.

Most of an eager step's time is library Python: a layer's `__call__`, an optimizer's
`apply_gradients`, `tape.gradient`. Where such a call has been walked through op by op, its nodes,
its arguments, its results and the state of Python's that it depends on are known; a later call that
fits runs natively (`native/delegation.h`). A call that fits nothing known runs its own Python, op
by op, and is learned again.

`library` says which functions are stood in for, `learning` watches a call and decides whether it
may be skipped, `purity` notices user code and side effects in it, `state` lists what it depends on,
`values` describes arguments and results.
"""
