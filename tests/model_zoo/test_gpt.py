"""The GPT decoder: shapes, initialisation, causality, tied weights."""

import math

import pytest
import torch

from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.registry import MODELS

pytestmark = pytest.mark.unit

TINY = GPTConfig(
    vocab_size=97, max_position_embeddings=16, hidden_size=32, num_layers=3, num_attention_heads=4
)


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(TINY).eval()


def test_logits_have_the_shape_of_the_tokens_and_the_vocabulary(model: GPT) -> None:
    assert model(torch.zeros(2, 16, dtype=torch.long)).shape == (2, 16, 97)
    assert model(torch.zeros(5, 3, dtype=torch.long)).shape == (5, 3, 97)


def test_the_first_loss_is_that_of_a_uniform_guess(model: GPT) -> None:
    tokens = torch.randint(97, (8, 16), generator=torch.Generator().manual_seed(1))
    assert GPTLMLoss()(model(tokens), tokens).item() == pytest.approx(math.log(97), abs=0.05)


def test_a_token_does_not_change_what_comes_before_it(model: GPT) -> None:
    tokens = torch.randint(97, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % 97
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=-1).min() > 1e-6


def test_the_loss_compares_each_position_with_the_next_token() -> None:
    labels = torch.tensor([[3, 1, 4, 1, 5]])
    logits = torch.zeros(1, 5, 8)
    logits[0, torch.arange(4), labels[0, 1:]] = 50.0
    assert GPTLMLoss()(logits, labels).item() == pytest.approx(0.0, abs=1e-6)
    assert GPTLMLoss()(torch.zeros(1, 5, 8), labels).item() == pytest.approx(math.log(8))


def test_head_and_token_embedding_are_one_parameter(model: GPT) -> None:
    assert model.head.weight is model.embedding.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    with torch.device("meta"):
        empty = GPT(TINY).to_empty(device="cpu")
    empty.tie_weights()
    empty.load_state_dict(model.state_dict())
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(empty.eval()(tokens), model(tokens))


def test_residual_projections_start_smaller(model: GPT) -> None:
    for block in model.blocks:
        assert block.mlp.projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.1)
        assert block.mlp.expansion.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.embedding.positions.weight.std().item() == pytest.approx(0.01, rel=0.2)


def test_dropout_acts_in_training_only(model: GPT) -> None:
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_builders_are_registered_and_take_overrides() -> None:
    with torch.device("meta"):
        model = MODELS.get_module("gpt2_medium")(num_layers=2, vocab_size=100)
    assert (len(model.blocks), model.head.out_features, model.config.hidden_size) == (2, 100, 1024)


def test_a_sequence_longer_than_the_positions_is_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="a sequence of 17 tokens, max_position_embeddings=16"):
        model(torch.zeros(1, 17, dtype=torch.long))
