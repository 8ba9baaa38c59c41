"""The TraceGraph: what all traces of a step have in common, and where they differ.

* `identity` - which nodes of different traces are probably the same one.
* `alignment` - where a trace runs along the merged nodes, and where it leaves them.
* `merging` - adds a trace to a sequence.
* `sequence` - merged traces in one line of nodes, cut into blocks.
* `graph` - the TraceGraph of a step: its sequences, and which of them to expect next.
"""
