"""A data method, a family, an attention and a side loss that are defined here train as one process does.

No file of the package changes for one of them: docs/design/README.md has the rows that name those inside.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from colossalai.amp import FullPrecision
from colossalai.booster.plugin import DataMethodPlugin
from colossalai.communication import all_gather, all_reduce, gather_forward_scatter_backward, ledger
from colossalai.context import Axis, _layout
from colossalai.context._process import ExpertForwards, process
from colossalai.global_variables import moe_env
from colossalai.nn import MoeLoss
from colossalai.nn.layer.moe import AddsLosses
from colossalai.nn.layer.sequence_parallel import ATTENTIONS, Order, SequenceAttention, own_positions
from colossalai.nn.parallel import (
    AppliedDataMethod,
    ArrivingParams,
    DataMethod,
    broadcast_from_first,
    call_on_grad,
)
from colossalai.shardformer import Rule, register_rule
from colossalai.tensor import gradient_sync
from tests.parity.table import MODES, shared, stages
from tests.parity.tasks import vectors
from tests.parity.training import Run, Task, train
from tests.turns import run_each

pytestmark = pytest.mark.dist

WIDTH = 6
ADAMW = partial(torch.optim.AdamW, lr=0.02)


@dataclass(frozen=True)
class OneByOne(DataMethod):
    """Averages each gradient by an all-reduce of its own, as soon as the backward has added to it."""

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        broadcast_from_first(module, replicas)
        return AppliedOneByOne(module, replicas)


class AppliedOneByOne(AppliedDataMethod):
    """That method, applied to a module."""

    def __init__(self, module: nn.Module, replicas: Axis) -> None:
        super().__init__(module)
        self.replicas = replicas
        self.syncs = True
        for param in module.parameters():
            call_on_grad(param, _average, self)

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        self.syncs = enabled


def _average(find_owner: Callable[[], AppliedOneByOne | None], param: nn.Parameter) -> None:
    owner = find_owner()
    if owner is not None and owner.syncs:
        assert param.grad is not None
        sync = gradient_sync(param, owner.replicas)
        param.grad = all_reduce(param.grad, sync.axis) / sync.divisor


class SumOfSquares(AddsLosses):
    """Adds the mean square of what goes through it to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        moe_env.add_loss(x.square().mean() if self.training else x.new_zeros(()), layer=self)
        return x


class Family(nn.Module):
    """A block of a family: a wide hidden layer, which a rule shares out.

    Args:
        with_loss: Whether a layer behind it adds a side loss.
    """

    def __init__(self, with_loss: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.side = SumOfSquares() if with_loss else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.side(x + self.narrow(torch.tanh(self.wide(self.norm(x)))))


FAMILY = Rule(columns=("wide",), rows=("narrow",), outside=("norm",))


class Net(nn.Module):
    """Blocks between linear layers.

    Args:
        with_loss: Whether the blocks add side losses.
    """

    def __init__(self, with_loss: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.Sequential(Family(with_loss), Family(with_loss))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def task_of(**changes: Any) -> Task:
    return replace(Task(build=Net, batches=partial(vectors, 8, 3), optimizer=ADAMW), **changes)


def with_a_data_method() -> int:
    with ledger() as book:
        train(Run(task=task_of(), num_ranks=2, plugin=partial(DataMethodPlugin, OneByOne())))
    return book.count("all_reduce")


def test_a_data_method() -> None:
    num_steps, num_params = 3, len(list(Net().parameters()))
    assert run_each(2, with_a_data_method, [()]) == [[num_steps * num_params] * 2]


@pytest.mark.unit
def test_a_plugin_of_a_data_method() -> None:
    plan = DataMethodPlugin(OneByOne(), recompute=True).plan(FullPrecision())
    assert (plan.data, plan.recompute, plan.data.label) == (OneByOne(), True, "OneByOne")
    with pytest.raises(ValueError, match="method is a str; it must be a DataMethod"):
        DataMethodPlugin("ddp")  # type: ignore[arg-type]


def with_a_family() -> None:
    def check(model: nn.Module) -> None:
        assert model.get_parameter("module.blocks.0.wide.weight").shape == (2 * WIDTH, WIDTH)

    register_rule(Family, FAMILY)
    train(Run(task=task_of(), num_ranks=2, config={"parallel": {"tensor": MODES["1d"]}}, check=check))


def test_a_family() -> None:
    run_each(2, with_a_family, [()])


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: Axis,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    order: Order = "zigzag",
    tile_size: int = 512,
    lanes: Tensor | None = None,
) -> Tensor:
    """Gather keys and values of the whole sequence, and attend to them from the positions of this rank."""
    assert (dropout_p, order) == (0.0, "contiguous"), "no dropout; the order is that of the value below"
    keys, values = gather_forward_scatter_backward(torch.stack((k, v)), axis, 3)  # (batch, heads, seq, head)
    rows = own_positions(keys.shape[2], axis, order=order, device=q.device)
    visible = torch.ones(len(rows), keys.shape[2], dtype=torch.bool)
    if causal:
        visible = rows[:, None] >= torch.arange(keys.shape[2])
    if key_padding_mask is not None:
        visible = visible & ~all_gather(key_padding_mask, 1, axis)[:, None, None, :]
    return nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale)


def any_heads(num_heads: int, num_ranks: int) -> None:
    """Take any number of heads."""


def with_an_attention(name: str, door: str) -> int:
    """Train a model of the zoo whose sequences are shared; return how often it has called the attention."""
    attend = MagicMock(side_effect=gathered_attention)
    attention = SequenceAttention(
        name="gathered", attend=attend, causal_order="contiguous", check_heads=any_heads
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ATTENTIONS, "gathered", attention)  # type: ignore[arg-type]
        patch.setattr(_layout, "SEQUENCE_ATTENTIONS", (*ATTENTIONS,))
        train(shared("gathered", 2, name=name, by_plugin=door == "booster"))
    return attend.call_count


def test_an_attention() -> None:
    counts = run_each(2, with_an_attention, [("gpt", "engine"), ("gpt", "booster"), ("bert", "engine")])
    assert min(map(min, counts)) > 0


def with_side_losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss of one process by its definition."""
    found: list[Tensor] = []
    handles = [
        block.side.register_forward_hook(lambda part, args, x: found.append(x.square().mean()))
        for block in model.blocks
    ]
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    for handle in handles:
        handle.remove()
    assert len(found) == 2
    loss = loss + 0.5 * sum(found)
    moe_env.reset_loss()
    return loss


def with_a_side_loss(config: dict[str, Any], is_loaded: bool) -> None:
    """Train with a side loss; of a model that was loaded no constructor has run in this process."""

    def place(model: nn.Module) -> nn.Module:
        if is_loaded:
            patch.setattr(process, "experts", ExpertForwards())
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "experts", ExpertForwards())
        task = task_of(
            build=partial(Net, with_loss=True),
            place=place,
            criterion=partial(MoeLoss, 0.5, nn.CrossEntropyLoss),
            loss=with_side_losses,
        )
        train(Run(task=task, num_ranks=2, config=config))


def test_a_side_loss() -> None:
    configs = ({}, {"zero": {"stage": 2}}, stages(2, num_microbatches=2))
    run_each(2, with_a_side_loss, [(config, is_loaded) for config in configs for is_loaded in (False, True)])
