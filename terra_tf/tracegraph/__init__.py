"""The TraceGraph: what all traces of a step have in common, and where they differ.

* `sequence` - one op sequence with all that several traces of it have shown.
* `graph` - the TraceGraph of a step: its sequences, and which of them to expect next.
"""
