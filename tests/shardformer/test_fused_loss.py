"""The loss of causal models of transformers in chunks: as their own over whole logits."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.nn.loss import MISSING_LOGITS, MissingLogitsError
from colossalai.shardformer import Rule, fuse_losses, register_rule
from tests.shardformer.models import (
    VOCAB,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    llama,
    mistral,
    opt,
    phi,
    phi3,
    planned,
    qwen2,
    qwen3,
)

pytest.importorskip("transformers")


mixtral = partial(planned, "Mixtral", num_local_experts=2, output_router_logits=True)
"""The loss has another term; there is a rule for the loss only."""


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, of which some do not count."""
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (3, 8))
    return ids, ids.masked_fill(torch.rand(3, 8) < 0.3, -100)


@pytest.mark.unit
@pytest.mark.parametrize("build", [gpt2, llama, mistral, qwen2, opt, phi, mixtral, qwen3, gemma3, glm4, phi3])
def test_as_the_loss_of_the_model(build: Callable[[], nn.Module], batch: Any) -> None:
    ids, labels = batch
    model = build().train()
    fused = copy.deepcopy(model)
    assert fuse_losses(fused) == fuse_losses(fused) == 1
    fused = copy.deepcopy(fused)  # hooks and all
    options: list[dict[str, Any]] = [
        {},
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(50)},
        {"shift_labels": labels.roll(-1, dims=1)},
        {"return_dict": False},
    ]
    for given in options:
        found = fused(ids, labels=labels, **given)
        wanted = model(ids, labels=labels, **given)
        grads = [
            torch.autograd.grad(output[0], list(each.parameters()))
            for output, each in ((wanted, model), (found, fused))
        ]
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=0)
        assert any(
            part is MISSING_LOGITS for part in (found if isinstance(found, tuple) else found.to_tuple())
        )
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)  # the sums run in another order


@pytest.mark.unit
def test_steps_aside(batch: Any) -> None:
    ids, labels = batch
    model = gpt2().train()
    wanted = model(ids, labels=labels)
    fuse_losses(model)
    output = model(ids, labels=labels)
    for read in (
        lambda logits: logits.argmax(-1),
        lambda logits: logits[0],
        lambda logits: torch.softmax(logits, -1),
        lambda logits: nn.functional.cross_entropy(logits, labels),
    ):
        with pytest.raises(MissingLogitsError, match="there are no logits: with fused_loss=True"):
            read(output.logits)
    assert torch.equal(model(ids).logits, wanted.logits)
    assert torch.equal(model.lm_head(model.transformer(ids).last_hidden_state), wanted.logits)
    with pytest.raises(ValueError, match="labels from"):
        model(ids, labels=labels + VOCAB)
    assert isinstance(model.lm_head(torch.zeros(2, 8)), torch.Tensor)  # forgotten where it raised
    evaluated = model.eval()(ids, labels=labels)
    assert torch.equal(evaluated.logits, wanted.logits)
    assert torch.equal(evaluated.loss, wanted.loss)
    assert not model.train()(ids, labels=labels).loss.isnan()
    with torch.no_grad():
        assert model(ids, labels=labels).logits is MISSING_LOGITS


class Adapted(nn.Module):
    """Around a linear layer, as adapters are."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.unit
def test_logits_that_the_model_caps_are_missed(batch: Any) -> None:
    """A plan names the head, but does not say that the loss gets what it returns."""
    model = gemma2().train()
    assert fuse_losses(model) == 1
    with pytest.raises(MissingLogitsError, match="there are no logits: with fused_loss=True"):
        model(batch[0], labels=batch[1])


@pytest.mark.unit
def test_refuses_what_it_cannot_take() -> None:
    model = gpt2()
    model.lm_head = Adapted(model.lm_head)
    with pytest.raises(ValueError, match=r"a head that is a .*Adapted: it must be a torch.nn.Linear"):
        fuse_losses(model)
    model = gpt2()
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has .*cross_entropy.* as its loss_function"):
        fuse_losses(model)


class OwnCausalModel(nn.Module):
    """A model that is not of transformers, and ends as they do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.loss_function = ForCausalLMLoss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.embedding(ids))
        return logits if labels is None else self.loss_function(logits, labels, VOCAB)


def ForCausalLMLoss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *args: Any) -> torch.Tensor:
    """The loss that transformers has under this name."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.unit
def test_a_rule_of_the_user(batch: Any) -> None:
    ids, labels = batch
    model = OwnCausalModel()
    assert fuse_losses(model) == 0
    register_rule(OwnCausalModel, Rule(loss_head="head"))
    wanted = model(ids, labels)
    assert fuse_losses(model) == 1
    torch.testing.assert_close(model(ids, labels), wanted)
