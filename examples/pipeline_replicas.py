"""Two stages, two replicas, tied embeddings: pipeline and data parallel training together.

    horovodrun -np 4 python examples/pipeline_replicas.py

The same program as `pipeline_gpt.py` with other settings. The table of tokens is used by the first
stage, to embed, and by the last, to predict; both stages of both replicas add their gradients up.
"""

import pathlib
import runpy
import sys

settings = ["--stages", "2", "--microbatches", "4", "--schedule", "1f1b", "--tied", "--batch", "8"]
sys.argv[1:1] = settings
runpy.run_path(str(pathlib.Path(__file__).with_name("pipeline_gpt.py")), run_name="__main__")
