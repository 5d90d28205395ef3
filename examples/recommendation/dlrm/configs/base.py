"""Common settings of the configs of this example."""

SEED = 1024

# Data: samples are drawn, or read with --data
TABLE_SIZES = (20_000, 8_000, 2_000, 500)
NUM_DENSE = 4
TRAINING_SAMPLES = 20_000_000
EVALUATION_SAMPLES = 200_000  # of --data: the last tenth of the file
EXPONENT = 1.7  # id k is drawn with a frequency of (k + 1) ** -EXPONENT
INTERACTIONS = ((1, 3), (2, 3))  # tables whose ids interact

# Model
EMBEDDING_DIM = 8
BOTTOM_SIZES = (64, 32)
TOP_SIZES = (64, 32)
CACHE_RATIO = 0.05  # share of the rows of a table that are cached
LEAST_CACHED_ROWS = 512  # a smaller table is cached as a whole

# Training
BATCH_SIZE = 4096  # samples in a batch of all ranks
WARMUP_STEPS = 100
DENSE_LEARNING_RATE = 5e-3
EVALUATIONS = 10  # along the way; each saves a checkpoint
