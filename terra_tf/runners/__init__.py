"""Co-execution phase: the PythonRunner and the GraphRunner, and what happens when they part.

* `python_runner` - one per step: chooses between tracing, co-execution and eager.
* `iteration` - the three ways in which an iteration runs.
* `prefix` - what an iteration had done before it fell back, as the beginning of a trace.
* `fallback` - replays the validated ops of an iteration eagerly.
* `in_flight` - iterations that Python has left and whose graph still runs; what failed there.
* `graph_runner` - the native background thread that executes graphs.
* `retreat` - stays eager where co-execution does not pay.
"""
