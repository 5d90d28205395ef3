"""A config of the GPT example that trains in a second; the dropout shows whether random states come back."""

VOCAB_SIZE = 300
SEQ_LEN = 16
HIDDEN_SIZE = 16
NUM_LAYERS = 2
NUM_HEADS = 2
INIT_STD = 0.2
EMBEDDING_DROPOUT = 0.1
DROPOUT = 0.1

SEED = 5
BATCH_SIZE = 4
TOTAL_STEPS = 60
WARMUP_STEPS = 5
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)

VALIDATE_EVERY = 25
VALIDATION_WINDOWS = 8
CHECKPOINT_EVERY = 15

gradient_accumulation = 2
clip_grad_norm = 1.0
