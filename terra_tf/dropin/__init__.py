"""Runs unmodified scripts with their iterations co-executed.

* `command` - the subcommand `terra run`.
* `script` - runs a file as `python FILE` would, and compiles it with its loops watched.
* `rewriting` - finds the loops in a program's text, and makes each tell of its turns.
* `importing` - the same for modules of the user's project, and what to do when a library arrives.
* `loops` - one execution of a watched loop; opens and closes iterations.
* `activity`, `nests` - what a thread does, and which loops were executed inside which.
* `roles` - decides from what a loop's turns did whether a turn is an iteration.
* `models` - Keras models that run eagerly: their training steps become steps of Terra's.
* `horovod` - refuses what Horovod does silently wrong with Keras 3.

Nothing here loads TensorFlow before the script does: scripts set environment variables that it
reads when it loads.
"""
