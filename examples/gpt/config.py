"""Configuration of the GPT example: hyper-parameters in capitals, features of the system in small letters.

Pass another file with --config to train something else; the script takes every value from here.
"""

import torch

from colossalai.amp import AMP_TYPE

# bfloat16 doubles the speed on a CPU that multiplies matrices of it in hardware, and halves it on others.
# Both numbers of steps below take two to three minutes on two cores. Measurements: docs/design/examples.md.
_capabilities = getattr(torch.cpu, "get_capabilities", dict)()
_fast_bf16 = torch.accelerator.is_available() or _capabilities.get("amx_bf16", False)

# Model: wide, not deep, with few heads. In so short a training width is worth more than depth.
VOCAB_SIZE = 2048
SEQ_LEN = 128
HIDDEN_SIZE = 416
NUM_LAYERS = 2
NUM_HEADS = 4
INIT_STD = 0.03
EMBEDDING_DROPOUT = 0.02
DROPOUT = 0.0  # the model sees no token more than once: nothing to regularise

# Training
SEED = 1024
BATCH_SIZE = 8  # sequences in a microbatch of one rank
TOTAL_STEPS = 800 if _fast_bf16 else 256  # optimizer steps
WARMUP_STEPS = TOTAL_STEPS // 10
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)

# Along the way, in optimizer steps
VALIDATE_EVERY = max(1, TOTAL_STEPS // 10)
VALIDATION_WINDOWS = 128  # sequences of a validation during the training; the last one takes all
CHECKPOINT_EVERY = max(1, TOTAL_STEPS // 16)

# Features
gradient_accumulation = 1
clip_grad_norm = 1.0
fp16 = {"mode": AMP_TYPE.BF16} if _fast_bf16 else None
