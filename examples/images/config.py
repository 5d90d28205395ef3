"""Configuration of the examples with `colossalai.initialize` (train_engine.py, train_trainer.py)."""

BATCH_SIZE = 32  # images in a batch of one rank
NUM_EPOCHS = 6
LEARNING_RATE = 0.1
WEIGHT_DECAY = 5e-4

clip_grad_norm = 1.0
