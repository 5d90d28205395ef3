"""The GPT example over a pipeline of two stages, each of which two processes share: four processes.

    colossalai run --nproc_per_node 4 examples/gpt/train.py --config examples/gpt/config_hybrid.py

Nothing else changes: the losses are those of config.py on two processes, and either goes on from the other's
checkpoint. Eight processes train two such pipelines side by side.
"""

from config import *  # noqa: F403 - the model and the training stay as they are

BATCH_SIZE = 16  # sequences in a batch of one pipeline
NUM_MICRO_BATCHES = 4

parallel = {
    "pipeline": {"size": 2, "schedule": "1f1b", "partition": "balanced"},
    "tensor": {"size": 2, "mode": "1d"},
}
