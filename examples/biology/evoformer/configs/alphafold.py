"""Sizes of AlphaFold 2 for --data, on 8 GPUs: two groups of four share a batch of two proteins."""

from base import *  # noqa: F403 - the values that all configs share

TRAINING_FAMILIES = 100_000
NUM_SEQUENCES = 128 + 1024
CROP = 256

C_M, C_Z, C_E = 256, 128, 64
CLUSTERS = 128
BLOCKS, EXTRA_BLOCKS = 48, 4
RECYCLES = 3
MAIN_OPTIONS = {}  # the defaults of EvoformerConfig are those of AlphaFold 2
EXTRA_OPTIONS = {"msa_head_dim": 8}

BATCH_SIZE = 2
LEARNING_RATE = 1e-3
WARMUP_STEPS = 1_000
MAX_NORM = 0.1
PRECISION = "bf16"
RECOMPUTE_BLOCKS = True
EVALUATIONS = 100

DAP_SIZE = 4
ZERO_STAGE = 1
