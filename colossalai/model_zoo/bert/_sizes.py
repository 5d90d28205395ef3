"""The published BERT sizes (Devlin et al. 2019, section 3), and functions that build them."""

from dataclasses import replace
from typing import Any

from colossalai.model_zoo.bert._config import BertConfig
from colossalai.model_zoo.bert._model import Bert
from colossalai.registry import MODELS

BERT_BASE = BertConfig()
BERT_LARGE = BertConfig(hidden_size=1024, num_layers=24, num_attention_heads=16)


@MODELS.register_module
def bert_base(**overrides: Any) -> Bert:
    """Build BERT base, 110M parameters; `overrides` replace fields of its `BertConfig`."""
    return Bert(replace(BERT_BASE, **overrides))


@MODELS.register_module
def bert_large(**overrides: Any) -> Bert:
    """Build BERT large, 335M parameters; `overrides` replace fields of its `BertConfig`."""
    return Bert(replace(BERT_LARGE, **overrides))
