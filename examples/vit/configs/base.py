"""Common settings of the configs of this example."""

NUM_EPOCHS = 12
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.05
PATCH_SIZE = 4  # four patches in an image of 8x8
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
TEST_BATCH_SIZE = 180

clip_grad_norm = 1.0
