"""What a user can learn about a co-executed program.

The core writes into three plain modules here and reads nothing from them:

* `counters` - running totals, and the public `Stats` snapshot of them.
* `reasons` - why iterations fell back, as data with stable codes.
* `observers` - callbacks that run when an iteration starts.

`explain` turns what was written into a page of text.
"""
