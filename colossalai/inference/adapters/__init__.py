"""Adapters of low rank (LoRA) in peft's files: read, compared with a model, cut over ranks as it is."""

from colossalai.inference.adapters._load import check_adapters as check_adapters
from colossalai.inference.adapters._load import load_adapters as load_adapters
