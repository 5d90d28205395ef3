"""Low-rank adapters (LoRA) in peft's files: read, checked against a model, and sharded like it."""

from colossalai.inference.adapters._load import check_adapters as check_adapters
from colossalai.inference.adapters._load import load_adapters as load_adapters
