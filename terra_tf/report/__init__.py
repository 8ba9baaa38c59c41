"""What a user can learn about a co-executed program: it reads the core, the core never reads it.

The one exception is `observers`, a list of callbacks that the core runs when an iteration starts.
"""
