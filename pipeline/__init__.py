"""Pipeline-parallel training on Horovod, for models written for TensorFlow 2.

A model is cut into stages, one or more per rank, and a batch into micro-batches that flow through
the stages by a schedule (GPipe, 1F1B, interleaved, zero-bubble). Nothing of it is here yet. To
come: schedules as data with a validator, a simulator that prices a schedule before anything runs,
the partition of a model into stages, point-to-point transfer between ranks, and the runtime that
executes a schedule. It builds on the public names of `terra_tf`, never the other way round.
"""
