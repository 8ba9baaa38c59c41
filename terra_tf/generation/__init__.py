"""Graph generation: from one op sequence of the TraceGraph to what both runners execute.

* `plan` - which nodes run where, which values are fed and fetched, where effects become visible.
* `blocks` - conditional regions of raw Switch and Merge.
* `variables` - what the graph knows of variables while it is built.
* `builder` - the `tf.function` graph with its communication ops.
* `program` - the same sequence as the matcher's checklist.
* `generated` - all of it together: a GeneratedGraph.
"""
