"""The config of the OPT service; all keys: docs/features/served_models.md. server.sh starts it."""

import os
from pathlib import Path

from colossalai.inference.models import opt_125M

_folder = Path(os.environ.get("CHECKPOINT_DIR", "/model_checkpoint"))
_restored = _folder / "restored.pt"  # metaseq's; else the folder is a checkpoint
_tokenizer = _folder / "tokenizer"

model_class = opt_125M
model_type = "gpt"
checkpoint = _restored if _restored.is_file() else _folder
tokenizer_path = _tokenizer if _tokenizer.is_dir() else None  # None: in the checkpoint's folder

tp_init_size = 1  # ranks that share each layer
pp_init_size = 1  # stages that share the layers
half = None  # as the model was published

server_host = "0.0.0.0"
server_port = 8020
log_level = "info"
executor_max_batch_size = 16
executor_max_queue_size = 0
cache_size = 50
cache_list_size = 2
timeout_keep_alive = 5
