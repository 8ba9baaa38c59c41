"""Trains a small GPT on the text of Python's own library, cut into four stages, with BPipe.

    horovodrun -np 4 python examples/pipeline_gpt.py

Each rank holds one stage: the embedding and some blocks, blocks, blocks, blocks and the head. At
the end rank 0 prints the report of all ranks and writes the timeline of the last step, for people
(timeline.png) and for chrome://tracing or Perfetto (timeline.json).
"""

import argparse
import inspect
import json
import pathlib
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import pipeline
from pipeline.benchmarks.gpt import cuts, gpt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch", type=int, default=16, help="samples of each replica in a step")
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--schedule", default="bpipe")
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--tied", action="store_true", help="the head uses the embedding's table")
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("."))
options = parser.parse_args()
LENGTH, WIDTH, BLOCKS = 64, 64, 8

# More ranks than cores: one thread each.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()

# The text, as bytes; each sample is a piece of it, and the same piece one byte later.
text = "".join(inspect.getsource(module) for module in (argparse, inspect, json, pathlib))
text = np.frombuffer(text.encode(), np.uint8).astype("int32")


def batch(step, replica):
    """This replica's samples of a step: other replicas get others."""
    random = np.random.default_rng((step, replica))
    starts = random.integers(0, len(text) - LENGTH - 1, options.batch)
    pieces = np.stack([text[start : start + LENGTH + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


pipe = pipeline.Pipeline(
    gpt(vocabulary=256, length=LENGTH, width=WIDTH, blocks=BLOCKS, dropout=0.1, tied=options.tied),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.AdamW(3e-3, global_clipnorm=1.0),
    num_stages=options.stages,
    num_microbatches=options.microbatches,
    schedule=options.schedule,
    partition=cuts(BLOCKS, options.stages),
)

start = time.monotonic()
for step in range(1, options.steps + 1):
    loss = pipe.train_step(*batch(step, pipe.replica))
    if step == 1:
        start = time.monotonic()  # the first step also builds and traces the stages
    elif hvd.rank() == 0 and (step % 5 == 0 or step == options.steps):
        samples = (step - 1) * options.batch * hvd.size() // options.stages
        rate = samples / (time.monotonic() - start)
        print(f"step {step:4d}  loss {loss:.4f}  {rate:.1f} samples/s", flush=True)

report, timeline = pipe.report(), pipe.timeline()
if hvd.rank() == 0:
    print(report)
    timeline.plot(options.folder / "timeline.png")
    timeline.chrome_trace(options.folder / "timeline.json")
    print(f"timeline of the last step: {options.folder / 'timeline.png'}, timeline.json")
