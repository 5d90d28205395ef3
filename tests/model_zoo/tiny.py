"""The transformers of the zoo at sizes that every tensor mode divides, and batches for them."""

import torch
from torch import nn

import colossalai.nn as col_nn
from colossalai.model_zoo.bert import Bert, BertConfig, BertMLMLoss
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.model_zoo.vit import ViT, ViTConfig

BATCH, SEQ, VOCAB, CLASSES = 8, 6, 16, 4
NO_DROPOUT = {"embedding_dropout": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
SHAPE = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2.0, "init_std": 0.3}
IMAGES = {"image_size": 8, "patch_size": 4, "num_classes": CLASSES}
TOKENS = {"vocab_size": VOCAB, "max_position_embeddings": SEQ}


def build(name: str, **overrides) -> nn.Module:
    """Build a model in the current tensor mode."""
    options = SHAPE | NO_DROPOUT | overrides
    if name == "gpt":
        return GPT(GPTConfig(**(TOKENS | options)))
    if name == "bert":
        return Bert(BertConfig(**(TOKENS | options)))
    return ViT(ViTConfig(**(IMAGES | options)))


def criterion_of(name: str) -> nn.Module:
    return {"gpt": GPTLMLoss, "bert": BertMLMLoss, "vit": col_nn.CrossEntropyLoss}[name]()


def make_batch(name: str, num: int, seed: int, vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        images = torch.randn(num, 3, 8, 8, generator=generator)
        return images, torch.randint(CLASSES, (num,), generator=generator)
    ids = torch.randint(vocab, (num, SEQ), generator=generator)
    if name == "gpt":
        return ids, ids
    hidden = torch.arange(SEQ) % 3 == 1  # as many in each sample: the mean over ranks is that over the batch
    return ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, -100)
