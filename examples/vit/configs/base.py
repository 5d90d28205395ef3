"""What the configs of this example share."""

NUM_EPOCHS = 20
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.05
PATCH_SIZE = 4  # four patches in an image of 8x8
HIDDEN_SIZE = 64
NUM_LAYERS = 4
NUM_HEADS = 4
TEST_BATCH_SIZE = 40

clip_grad_norm = 1.0
