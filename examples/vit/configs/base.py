"""What the configs of this example share."""

NUM_EPOCHS = 24
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
HIDDEN_SIZE = 64
NUM_LAYERS = 4
NUM_HEADS = 4
TEST_BATCH_SIZE = 40

clip_grad_norm = 1.0
