"""Sequences cut along an axis of their own, with either attention, beside other methods, by both doors."""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.communication import Ledger, ledger
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, Subject, check_parity
from tests.model_zoo.test_sequence_mode import BATCH, BUILD, SEQ, make_batch
from tests.model_zoo.tiny import SHAPE, criterion_of
from tests.parity.subjects import pipeline, zero
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import each_in_turn

pytestmark = pytest.mark.dist

MAX_NORM = 0.3
TENSOR: dict[str | None, dict[str, Any]] = {
    None: {"size": 1, "mode": None},
    "1d": {"size": 2, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 4, "mode": "2.5d", "depth": 1},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What stands beside cut sequences; what is left of the ranks holds replicas."""

    attention: str
    name: str = "gpt"
    size: int = 2
    tensor: str | None = None
    pipeline: int = 1
    stage: int = 0
    handler: bool = False
    door: str = "engine"

    @property
    def config(self) -> dict[str, Any]:
        parallel: dict[str, Any] = {
            "sequence": {"size": self.size, "attention": self.attention},
            "tensor": TENSOR[self.tensor],
        }
        config: dict[str, Any] = {"parallel": parallel, "clip_grad_norm": MAX_NORM}
        if self.pipeline > 1:
            parallel["pipeline"] = {"size": self.pipeline, "partition": "uniform"}
            config["NUM_MICRO_BATCHES"] = 2
        handlers = [{"type": "SequenceParallelGradientHandler"}]
        config |= {"gradient_handler": handlers} if self.handler else {}
        return config | ({"zero": {"stage": self.stage}} if self.stage else {})

    @property
    def plugin(self) -> dict[str, Any]:
        tensor = TENSOR[self.tensor]
        options: dict[str, Any] = {
            **{"sp_size": self.size, "sequence_attention": self.attention, "tp_size": tensor["size"]},
            **{"pp_size": self.pipeline, "zero_stage": self.stage, "max_norm": MAX_NORM},
        }
        return options | ({"num_microbatches": 2} if self.pipeline > 1 else {})


def train(case: Case) -> list[float]:
    """Train; the plain twin is built before anything is cut."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    plain, plain_criterion = BUILD(case.name), criterion_of(case.name)
    colossalai.launch_from_torch(case.config if case.door == "engine" else {}, verbose=False)
    parity = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        # Keys have a bias whose gradient is 0 but for rounding: Adam divides that by eps.
        build_optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
        compute_loss=lambda model, batch: plain_criterion(model(*batch[:2]), batch[2]),
        batches=[make_batch(case.name, seed) for seed in range(3)],
        max_norm=MAX_NORM,
        seed=3,
    )
    through = {"engine": through_engine, "booster": through_booster}[case.door]
    if case.door == "booster":
        # The mesh says which part of a batch a rank takes.
        HybridParallelPlugin(**case.plugin).configure()
    losses = check_parity(parity, lambda _: through(case, parity), **slice_of_batch())
    gpc.destroy()
    return losses


def through_engine(case: Case, parity: ParityCase) -> Subject:
    model, criterion, optimizer = built(case, parity)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        engine.zero_grad()
        if case.pipeline > 1:
            loss = engine.execute_schedule(iter([(batch[:2], batch[2])]))[2]
        else:
            loss = engine.criterion(engine(*batch[:2]), batch[2])
            engine.backward(loss)
        engine.step()
        return loss.detach()

    return subject(case, engine.model, engine.optimizer, step)


def through_booster(case: Case, parity: ParityCase) -> Subject:
    booster = Booster(plugin=HybridParallelPlugin(**case.plugin))
    model, criterion, optimizer = built(case, parity)
    model, optimizer, *_ = booster.boost(model, optimizer)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        if case.pipeline > 1:
            pair = (batch[:2], batch[2])
            loss = booster.execute_pipeline(iter([pair]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(*batch[:2]), batch[2])
            booster.backward(loss, optimizer)
        optimizer.step()
        return loss.detach()

    return subject(case, model, optimizer, step)


def built(case: Case, parity: ParityCase) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(parity.seed)
    model = BUILD(case.name)
    return model, criterion_of(case.name), parity.build_optimizer(model.parameters())


def subject(case: Case, model: nn.Module, optimizer: Any, step: Any) -> Subject:
    return (zero if case.stage in (1, 2) else pipeline).subject_of(model, optimizer, step)


def train_all(cases: list[Case]) -> list[list[float]]:
    """Train each; one start of ranks serves them all."""
    return [train(case) for case in cases]


def check(num_ranks: int, cases: list[Case]) -> None:
    for losses in run_ranks(train_all, num_ranks, cases):
        for case, found in zip(cases, losses, strict=True):
            assert len(set(found)) == 3, case


@pytest.mark.parametrize(
    "cases",
    [
        [Case(attention="ulysses"), Case(attention="ring")],
        further([Case(attention="ulysses", name="bert")]),
    ],
)
def test_on_two_ranks(cases: list[Case]) -> None:
    check(2, cases)


def beside_one_other(attention: str) -> tuple[list[Case], list[Case]]:
    """Return the cases for four ranks of which each has a method or a door of its own, and the others."""
    first = [
        Case(attention=attention, tensor="1d", name="bert", door="booster"),
        Case(attention=attention, stage=2),
        Case(attention=attention, handler=True, tensor="1d"),
        Case(attention=attention, pipeline=2),
    ]
    others = [
        Case(attention=attention),  # and two replicas
        Case(attention=attention, stage=1, door="booster"),
        Case(attention=attention, tensor="1d"),
        Case(attention=attention, stage=1, tensor="1d"),
    ]
    return first, others


ULYSSES, RING = beside_one_other("ulysses"), beside_one_other("ring")
FOUR_SHARE = [Case(attention="ulysses", size=4, name=name) for name in ("gpt", "bert")]


@pytest.mark.parametrize(
    "cases",
    [ULYSSES[0], further([*ULYSSES[1], *FOUR_SHARE]), further([*RING[0], *RING[1]])],
)
def test_beside_one_other_method_and_shared_by_all_four_ranks(cases: list[Case]) -> None:
    check(4, cases)


def beside_several_others(attention: str) -> list[Case]:
    """Return the cases for eight ranks."""
    return [
        Case(attention=attention, tensor="2d"),
        Case(attention=attention, tensor="2.5d", name="bert"),
        Case(attention=attention, tensor="1d", stage=2),
        Case(attention=attention, tensor="1d", stage=3),
        Case(attention=attention, tensor="1d", stage=3, door="booster"),
        Case(attention=attention, tensor="1d", pipeline=2, stage=1, door="booster"),
        Case(attention=attention, tensor="1d", pipeline=2, name="bert"),
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "cases",
    [
        [*beside_several_others("ring")[::2], *beside_several_others("ulysses")[1::2]],
        in_soak([*beside_several_others("ring")[1::2], *beside_several_others("ulysses")[::2]]),
    ],
)
def test_beside_several_other_methods(cases: list[Case]) -> None:
    check(8, cases)


def sent_in_a_step(attention: str, size: int, tensor: str | None) -> tuple[Ledger, Ledger]:
    config = {"sequence": {"size": size, "attention": attention}, "tensor": TENSOR[tensor]}
    colossalai.launch_from_torch({"parallel": config}, verbose=False)
    torch.manual_seed(3)
    model, criterion = BUILD("gpt"), criterion_of("gpt")
    ids, mask, labels = make_batch("gpt", 0)
    with ledger() as forward:
        loss = criterion(model(ids, mask), labels)
    with ledger() as backward:
        loss.backward()
    gpc.destroy()
    return forward, backward


@pytest.mark.parametrize(("size", "tensor"), [further(2, "1d"), (4, None)])
def test_a_step_sends_what_the_page_says(size: int, tensor: str | None) -> None:
    """Of n bytes of keys of a layer on a rank; a padding mask has a byte for each position."""
    tp = TENSOR[tensor]["size"]
    n = BATCH * SEQ // size * SHAPE["hidden_size"] // tp * 4
    mask, layers = BATCH * SEQ // size, SHAPE["num_layers"]
    attentions = ("ring", "ulysses")
    cells = [(attention, size, tensor) for attention in attentions]
    for of_rank in run_ranks(each_in_turn, size * tp, sent_in_a_step, cells):
        for attention, (forward, backward) in zip(attentions, of_rank, strict=True):
            loss = 2 * (size - 1) / size * 4  # the sum of a number over the ranks
            if attention == "ring":
                sent = (size - 1) * (2 * n + mask), (size - 1) * (4 * n + mask)
                counts = (size - 1) * 3, (size - 1) * 5
            else:
                sent = 4 * n * (size - 1) / size + (size - 1) * mask, 4 * n * (size - 1) / size
                counts = 3, 2
            assert forward.num_bytes(axis="sp") == layers * sent[0] + loss
            assert backward.num_bytes(axis="sp") == layers * sent[1]
            assert forward.count(axis="sp") == layers * counts[0] + 1
            assert backward.count(axis="sp") == layers * counts[1]


def dropped(attention: str, size: int, tensor: str | None) -> tuple[float, list[float]]:
    """Return a loss with dropped attention weights, and a mask of tokens once the model is assembled."""
    torch.set_default_dtype(torch.float64)
    config = {"sequence": {"size": size, "attention": attention}, "tensor": TENSOR[tensor]}
    colossalai.launch_from_torch({"parallel": config}, verbose=False)
    torch.manual_seed(3)
    model, criterion = BUILD("gpt", attention_dropout=0.5), criterion_of("gpt")
    ids, mask, labels = make_batch("gpt", 0)
    loss = criterion(model(ids, mask), labels).item()
    optimizer = torch.optim.SGD(model.parameters())
    colossalai.initialize(model, optimizer, criterion, verbose=False)
    tokens = nn.functional.dropout(torch.ones(64)).tolist()
    gpc.destroy()
    return loss, tokens


def test_dropout_belongs_to_heads_and_tokens_wherever_they_are() -> None:
    ((expected, _),) = run_ranks(dropped, 1, "ring", 1, None)
    cells = [(attention, 2, "1d") for attention in ("ring", "ulysses")]
    for found in zip(*run_ranks(each_in_turn, 4, dropped, cells), strict=True):
        assert [loss for loss, _ in found] == pytest.approx([expected] * 4, rel=1e-12)
        masks = [mask for _, mask in found]
        assert masks[0] == masks[1] != masks[2] == masks[3]  # neighbours hold the same tokens


def refusals() -> list[str]:
    colossalai.launch_from_torch({}, verbose=False)
    found = []
    for options in (
        {"sequence_attention": "ulysses"},
        {"sp_size": 2, "tp_size": 2, "sequence_parallel": True},
        {"sp_size": 2, "sequence_attention": "star"},
        {"sp_size": 3},
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are what is returned
            HybridParallelPlugin(**options).configure()
        found.append(str(caught.value))
    HybridParallelPlugin(tp_size=2, sequence_parallel=True, sequence_attention="ulysses").configure()
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        BUILD("gpt", num_attention_heads=1)
    found.append(str(caught.value))
    gpc.destroy()
    return found


def test_what_cannot_be_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for messages in run_ranks(refusals, 2):
        for message, wanted in zip(
            messages,
            [
                "sequence_attention is 'ulysses', but no ranks share a sequence: pass sp_size",
                "sp_size is 2, and sequence_parallel=True lets the 2 ranks of tp_size share",
                "attention is 'star'; it must be one of 'ring', 'ulysses'",
                "2 processes, but data 1 x pipeline 1 x sequence 3 = 3",
                "each of the 2 ranks that share a sequence some of the 1 heads",
            ],
            strict=True,
        ):
            assert wanted in message
    assert "write sp_size=2 in the place of tp_size=2, sequence_parallel=True" in capfd.readouterr().out
