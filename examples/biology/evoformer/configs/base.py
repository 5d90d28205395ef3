"""Common settings of the configs of this example."""

SEED = 1024

# Data: families are drawn, or read with --data
TRAINING_FAMILIES = 3_000
EVALUATION_FAMILIES = 64  # of --data: of the last tenth of the files
NUM_SEQUENCES = 12  # in an alignment
MASKED = 0.15  # share of the positions that are predicted
LENGTHS = (24, 32)  # least and greatest number of residues of a drawn family
COUPLING = 2.0  # strength of the preferences of residues in contact
MUTATED = 0.15  # share of residues and pairs that a sequence draws again
CROP = 64  # greatest number of residues, of --data

# Model
C_M, C_Z, C_E = 32, 24, 16  # widths of alignment, pairs and extra sequences
CLUSTERS = 8  # sequences in the main stack; the others are extra sequences
BLOCKS, EXTRA_BLOCKS = 2, 1
RECYCLES = 1  # passes without gradients before the one with
_PAIRS = {
    "pair_heads": 2,
    "pair_head_dim": 8,
    "triangle_dim": 24,
    "transition_factor": 2,
    "pair_dropout": 0.0,
}
MAIN_OPTIONS = {"msa_heads": 4, "msa_head_dim": 8, "outer_dim": 8, "msa_dropout": 0.0, **_PAIRS}
EXTRA_OPTIONS = {"msa_heads": 2, "msa_head_dim": 8, "outer_dim": 8, "msa_dropout": 0.0, **_PAIRS}

# Training
BATCH_SIZE = 8  # families of a step of all ranks
LEARNING_RATE = 1e-2
WARMUP_STEPS = 50
MAX_NORM = 1.0
PRECISION = "fp32"
RECOMPUTE_BLOCKS = False
EVALUATIONS = 10  # along the way; each saves a checkpoint
