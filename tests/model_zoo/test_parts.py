"""The parts of the models under their documented names, put together by hand as the documentation does."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import colossalai
import colossalai.nn as col_nn
from colossalai.context import ParallelMode, set_mode
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTBlock, GPTConfig, GPTEmbedding, GPTLMHead
from colossalai.model_zoo.vit import ViT, ViTBlock, ViTConfig, ViTEmbedding, ViTHead
from colossalai.nn.layer import DropPath
from tests.parity.table import MODES
from tests.ranks import run_ranks

HIDDEN, HEADS, VOCAB, SEQ = 16, 4, 13, 6


class StageOfGPT(nn.Module):
    """A stage as the documentation of pipelines writes it."""

    def __init__(self, *, num_layers, dtype=torch.float, checkpoint=False, act_func=functional.gelu):
        super().__init__()
        self.embedding = GPTEmbedding(HIDDEN, VOCAB, SEQ, dropout=0.0, dtype=dtype)
        self.blocks = nn.ModuleList(
            GPTBlock(
                HIDDEN,
                HEADS,
                mlp_ratio=4,
                attention_dropout=0.0,
                dropout=0.0,
                dtype=dtype,
                checkpoint=checkpoint,
                activation=act_func,
            )
            for _ in range(num_layers)
        )
        self.norm = col_nn.LayerNorm(HIDDEN, eps=1e-5)
        self.head = GPTLMHead(vocab_size=VOCAB, dim=HIDDEN, dtype=dtype, bias=False)

    def forward(self, hidden_states=None, input_ids=None, attention_mask=None):
        hidden_states = self.embedding(input_ids=input_ids)
        batch_size = hidden_states.shape[0]
        attention_mask = attention_mask.view(batch_size, -1)
        attention_mask = attention_mask[:, None, None, :]
        attention_mask = attention_mask.to(dtype=hidden_states.dtype)
        attention_mask = (1.0 - attention_mask) * -10000.0
        for block in self.blocks:
            hidden_states, attention_mask = block(hidden_states, attention_mask)
        return self.head(self.norm(hidden_states))


def stage_against_gpt(mode, *, checkpoint):
    """Compare a stage with the GPT that has its parameters; return whether gradients are there."""
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]} if mode else {}}, verbose=False)
    torch.manual_seed(0)
    rates = {"embedding_dropout": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_layers": 2, "vocab_size": VOCAB}
    model = GPT(GPTConfig(max_position_embeddings=SEQ, **sizes, **rates))
    stage = StageOfGPT(num_layers=2, checkpoint=checkpoint)
    stage.load_state_dict(model.state_dict())
    ids = torch.arange(4 * SEQ).view(4, SEQ) % VOCAB
    mask = (torch.arange(SEQ) < torch.tensor([[6], [5], [3], [6]])).long()
    logits = stage(input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(logits, model(ids, mask))
    logits.sum().backward()
    assert all(param.grad is not None for param in stage.parameters())
    assert stage.embedding.word_embeddings.weight is stage.embedding.tokens.weight


@pytest.mark.dist
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("mode", [None, "1d"])
def test_a_stage_of_gpt(mode, checkpoint):
    run_ranks(partial(stage_against_gpt, checkpoint=checkpoint), MODES[mode]["size"] if mode else 1, mode)


def make_vit(*, drop_path=0.0, **options):
    depth, common = 2, {"dtype": torch.float64, "init_method": "torch"}
    embedding = ViTEmbedding(
        img_size=8, patch_size=4, in_chans=3, embedding_dim=HIDDEN, dropout=0.0, **common
    )
    rates = [x.item() for x in torch.linspace(0, drop_path, depth)]
    blocks = [
        ViTBlock(
            dim=HIDDEN,
            num_heads=HEADS,
            mlp_ratio=4,
            attention_dropout=0.0,
            dropout=0.0,
            drop_path=rates[index],
            activation=functional.gelu,
            bias=True,
            checkpoint=False,
            **common,
        )
        for index in range(depth)
    ]
    norm = col_nn.LayerNorm(normalized_shape=HIDDEN, eps=1e-6, dtype=torch.float64)
    return nn.Sequential(embedding, *blocks, norm, ViTHead(dim=HIDDEN, num_classes=5, **common, **options))


@pytest.mark.unit
def test_the_parts_of_vit():
    config = {"image_size": 8, "patch_size": 4, "num_classes": 5, "hidden_size": HIDDEN, "num_layers": 2}
    model = ViT(ViTConfig(num_attention_heads=HEADS, **config)).double()
    parts = make_vit()
    for mine, theirs in zip(parts.parameters(), model.parameters(), strict=True):
        mine.data.copy_(theirs)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(parts(images), model(images))
    assert make_vit(representation_size=7)(images).shape == (2, 5)
    with pytest.raises(ValueError, match="init_method='jax'; it must be 'torch'"):
        ViTHead(16, 5, init_method="jax")


@pytest.mark.unit
def test_drop_path_drops_whole_samples_in_training():
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 2, 3)
    y = layer(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert torch.equal(y.amax((1, 2)), y.amin((1, 2)))
    assert y.mean().item() == pytest.approx(1.0, abs=0.05)
    assert layer.eval()(x) is x
    with pytest.raises(ValueError, match=r"drop_path=1\.0"):
        DropPath(1.0)


def dropped_samples(mode):
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]}}, verbose=False)
    torch.manual_seed(gpc.get_global_rank())
    set_mode(ParallelMode.DATA)  # as an assembled model has it: the ranks that share samples agree again
    layer = make_vit(drop_path=0.5)[2].drop_path
    return tuple((layer(torch.ones(32, 1, 1)) == 0).flatten().tolist())


@pytest.mark.dist
def test_drop_path_agrees_where_the_ranks_hold_parts_of_the_same_samples():
    assert len(set(run_ranks(dropped_samples, 2, "1d"))) == 1
    found = run_ranks(dropped_samples, 4, "2d")  # ranks are (col, row), and col cuts the batch
    assert found[0] == found[1] != found[2] == found[3]
