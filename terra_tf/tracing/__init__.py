"""Tracing phase: the program runs eagerly, and every op call of an iteration becomes a Trace.

* `trace` - the data: a Trace of Nodes, the values that come from outside, what was looked at.
* `recorder` - fills a Trace while the program runs.
* `location` - the user's file and line of a call.
"""
