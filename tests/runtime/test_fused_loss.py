"""What `fused_loss=True` does at the doors: labels for the model, its loss, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.nn import Accuracy, CrossEntropyLoss
from colossalai.nn.loss import MISSING_LOGITS, MissingLogitsError
from colossalai.runtime import Plan, criterion_of
from colossalai.trainer import Trainer, hooks
from tests.ranks import run_ranks

VOCAB = 21
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 8, "hidden_size": 8, "num_attention_heads": 2}
RATES = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**SIZES, **RATES, num_layers=2, init_std=0.3), **options)


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (8, 8), generator=generator)
    return ids, ids.masked_fill(torch.rand(8, 8, generator=generator) < 0.3, -100)


@pytest.mark.unit
def test_a_gpt_that_was_built_with_it() -> None:
    ids, labels = batch()
    plain, fused = gpt(), gpt(fused_loss=True)
    logits = plain(ids)
    wanted = GPTLMLoss()(logits, labels)
    output = fused(ids, labels=labels)
    torch.testing.assert_close(output.loss, wanted)
    assert torch.equal(plain(ids, labels=labels).loss, wanted)
    assert output.logits is MISSING_LOGITS
    pair = GPTLMLoss(with_count=True)(output, labels)
    assert torch.equal(pair[0] / pair[1], GPTLMLoss()(output, labels))
    assert pair[1] == (labels[:, 1:] != -100).sum()
    with pytest.raises(MissingLogitsError, match="there are no logits"):
        output.logits.argmax(-1)
    with pytest.raises(MissingLogitsError, match="has no 'flatten'"):  # a criterion that wants logits
        output.flatten(0, 1)
    assert torch.equal(fused(ids), logits)
    evaluated = fused.eval()(ids, labels=labels)
    assert torch.equal(evaluated.logits, logits)
    assert torch.equal(evaluated.loss, wanted)


def wants_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.unit
def test_refuses_a_criterion_that_wants_logits() -> None:
    refused = {
        "CrossEntropyLoss": (nn.CrossEntropyLoss(), CrossEntropyLoss()),
        "cross_entropy": (nn.functional.cross_entropy, partial(nn.functional.cross_entropy, reduction="sum")),
    }
    for name, criteria in refused.items():
        for criterion in criteria:
            with pytest.raises(ValueError, match=f"the criterion is {name}, which wants logits"):
                criterion_of(criterion, fused_loss=True)
            assert criterion_of(criterion, fused_loss=False) is criterion
    for criterion in (GPTLMLoss(), wants_logits):  # of the last one nothing is known
        assert criterion_of(criterion, fused_loss=True) is criterion
    own = criterion_of(None, fused_loss=True)
    assert own is not None
    assert criterion_of(own, fused_loss=True) is own
    with pytest.raises(ValueError, match="this Tensor has none: give the model labels"):
        own(torch.zeros(2))
    assert criterion_of(None, fused_loss=False) is None


@pytest.mark.unit
def test_config_and_plan() -> None:
    assert Plan.from_config(Config({"fused_loss": True})).fused_loss
    assert "fused_loss=True" in str(Plan(fused_loss=True))
    assert not Plan.from_config(Config({})).fused_loss
    with pytest.raises(ConfigException, match="fused_loss is 'yes'; it must be True or False"):
        check_config(Config({"fused_loss": "yes"}), 1)
    tensor = {"size": 4, "mode": "2d"}
    with pytest.raises(ValueError, match="tensor 2d and fused loss cannot be combined"):
        Plan.from_config(Config({"fused_loss": True, "parallel": {"tensor": tensor}}))


def through_engine() -> None:
    colossalai.launch_from_torch({"fused_loss": True}, verbose=False)
    losses = {}
    for criterion in (None, GPTLMLoss(), GPTLMLoss(with_count=True), lambda output, labels: output.loss):
        model = gpt()
        engine, *_ = colossalai.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.5), criterion, verbose=False
        )
        output, label, loss = engine.execute_schedule(iter([batch()]))
        assert output is MISSING_LOGITS
        engine.step()
        engine.eval()
        output, label, evaluated = engine.execute_schedule(iter([batch()]), forward_only=True)
        assert output.shape == (8, 8, VOCAB)
        torch.testing.assert_close(evaluated, GPTLMLoss()(output, label))
        assert evaluated < loss
        losses[criterion] = (loss.item(), evaluated.item())
        if criterion is None:  # labels beside the ids, by their name
            by_name = {"input_ids": batch()[0], "labels": batch()[1]}
            assert engine.execute_schedule(iter([(by_name, None)]), forward_only=True)[2] == evaluated
    assert len({tuple(f"{value:.5f}" for value in pair) for pair in losses.values()}) == 1
    through_trainer(engine)
    model = gpt()
    with pytest.raises(ValueError, match="the criterion is CrossEntropyLoss, which wants logits"):
        colossalai.initialize(model, None, CrossEntropyLoss(), verbose=False)
    with pytest.raises(
        ValueError, match="Linear is not a language model that computes head and loss together"
    ):
        colossalai.initialize(nn.Linear(2, 2), verbose=False)
    through_booster()
    gpc.destroy()


def through_trainer(engine: Any) -> None:
    trainer = Trainer(engine)
    accuracy = hooks.AccuracyHook(Accuracy())
    with pytest.raises(
        ValueError, match="AccuracyHook reads logits, and with fused_loss=True there are none"
    ):
        trainer.fit([batch()], 1, hooks=[accuracy])
    trainer.fit([batch()], 1, hooks=[hooks.LossHook()])
    assert trainer.metrics["train"].epoch_values["Loss"] > 0.0
    assert 0.0 <= trainer.evaluate([batch()], hooks=[accuracy])["Accuracy"] <= 1.0
    assert trainer.predict(batch()[0]).shape == (8, 8, VOCAB)


def through_booster() -> None:
    with pytest.raises(ValueError, match="fused_loss is 1; it must be True or False"):
        Booster(fused_loss=1)
    booster = Booster(fused_loss=True)
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match="the criterion is CrossEntropyLoss, which wants logits"):
        booster.boost(model, optimizer, nn.CrossEntropyLoss())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer)
    assert criterion is None
    ids, labels = batch()
    output = model(ids, labels=labels)
    booster.backward(output.loss, optimizer)
    optimizer.step()
    assert output.logits is MISSING_LOGITS
    assert model(ids, labels=labels).loss < output.loss


def in_a_pipeline() -> list[Any]:
    """Return what a pipeline gives in training and in evaluation, by either kind of batch."""
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4)
    booster = Booster(plugin=plugin, fused_loss=True)
    model = gpt()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    ids, labels = batch()
    found = []
    for given in ((ids, labels), {"input_ids": ids, "labels": labels}):
        result = booster.execute_pipeline(iter([given]), model, optimizer=optimizer, return_outputs=True)
        found += [result["loss"].item(), result["outputs"] is MISSING_LOGITS]
        optimizer.zero_grad()
    model.eval()
    result = booster.execute_pipeline(
        iter([(ids, labels)]), model, GPTLMLoss(with_count=True), return_outputs=True
    )
    found += [result["loss"].item(), None if result["outputs"] is None else tuple(result["outputs"].shape)]
    gpc.destroy()
    return found


@pytest.mark.dist
def test_engine_trainer_and_booster() -> None:
    run_ranks(through_engine, 1)


@pytest.mark.dist
def test_pipeline() -> None:
    first, last = run_ranks(in_a_pipeline, 2)
    assert first[0] == first[2] == last[0]
    assert (first[1], last[1], last[3]) == (False, True, True)
    wanted = GPTLMLoss()(gpt()(batch()[0]), batch()[1]).item()
    assert first[4] == pytest.approx(wanted, rel=1e-5)
    assert (first[5], last[5]) == (None, (8, 8, VOCAB))
