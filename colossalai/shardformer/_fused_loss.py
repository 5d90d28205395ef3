"""Loss in chunks for models of transformers, whose forward goes from the head to the loss by itself.

If such a model gets labels in training, its head returns `MISSING_LOGITS` and stores its input for the
model's loss function, which is called next. A hook before each forward detects labels. So the model's own
code runs, on every stage of a pipeline, and its other outputs are unchanged.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from colossalai.nn.loss import MISSING_LOGITS, HeadOperands, VocabularySlice, head_operands, refuse_other_head
from colossalai.pipeline import is_elsewhere
from colossalai.shardformer._layers import AXIS, HeadShard
from colossalai.shardformer._registry import parts_of, rule_of
from colossalai.shardformer._tp_plan import planned_head

LossFunction = Callable[..., torch.Tensor]
_LOSS_NAME = "ForCausalLMLoss"


def fuse_losses(model: nn.Module) -> int:
    """Let the models of transformers in a model compute head and loss together; in place.

    Args:
        model: The model, or a stage of it, its layers cut already.

    Returns:
        Number of such models, here or on other stages; 0 if no class has a rule with a `loss_head`, and no
        model a plan with one.

    Raises:
        ValueError: The head is not a linear layer, or the model has its own loss function.
    """
    heads = [(part, _loss_head(part)) for _, part in parts_of(model)]
    found = [(part, name) for part, name in heads if name is not None]
    for part, name in found:
        head = getattr(part, name)
        if not is_elsewhere(head) and not isinstance(head.forward, _DeferredHead):
            _fuse(part, head)
    return len(found)


def _loss_head(model: nn.Module) -> str | None:
    """Return the name of the head of a model, by the rule of its class, or else by its plan.

    With a plan, it is unknown whether the loss gets the logits unchanged; any other user of them gets
    `MISSING_LOGITS`, which raises an error.
    """
    rule = rule_of(model)
    return planned_head(model) if rule is None else rule.loss_head


def _fuse(model: nn.Module, head: nn.Module) -> None:
    if not isinstance(head, HeadShard):
        refuse_other_head(head)
    owner: Any = model
    original = owner.loss_function
    if getattr(original, "__name__", None) != _LOSS_NAME:
        raise ValueError(
            f"fused_loss computes the loss of a causal language model, and {type(model).__name__} has "
            f"{original!r:.80} as its loss_function: leave fused_loss out, or the loss function as it was"
        )
    state = _HeadState()
    names = tuple(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(_LabelHook(state, names), with_kwargs=True)
    model.register_forward_hook(_ResetHook(state), always_call=True)
    head.forward = _DeferredHead(state, head, head.forward)
    owner.loss_function = _FusedLoss(state, original)


@dataclass
class _HeadState:
    """State of a head and the loss behind it in the current forward.

    Attributes:
        is_wanted: Whether the forward computes a loss without logits.
        operands: Operands of the head, until the loss takes them.
    """

    is_wanted: bool = False
    operands: HeadOperands | None = None


@dataclass
class _LabelHook:
    """A hook before the forward of a model: whether it is given labels, in training."""

    state: _HeadState
    names: tuple[str, ...]

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self.state.is_wanted = module.training and given.get("labels") is not None


@dataclass
class _ResetHook:
    """A hook behind it, also where it raises: the head called alone gives logits."""

    state: _HeadState

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.state.is_wanted, self.state.operands = False, None


@dataclass
class _DeferredHead:
    """The forward of the head."""

    state: _HeadState
    head: nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> Any:
        if not self.state.is_wanted:
            return self.forward(x)
        self.state.operands = _operands(self.head, x)
        return MISSING_LOGITS


@dataclass
class _FusedLoss:
    """The loss function of the model."""

    state: _HeadState
    original: LossFunction

    def __call__(
        self,
        logits: Any,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if logits is not MISSING_LOGITS or self.state.operands is None:
            return self.original(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
            )
        operands, self.state.operands = self.state.operands, None
        if shift_labels is None:
            shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        shift_labels = shift_labels.to(operands.x.device).view(operands.x.shape[:-1])
        if num_items_in_batch is None:
            return operands.loss(shift_labels, ignore_index=ignore_index, reduction="mean")
        total = operands.loss(shift_labels, ignore_index=ignore_index, reduction="sum")
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch


def _operands(head: nn.Module, x: torch.Tensor) -> HeadOperands:
    if not isinstance(head, HeadShard):
        return head_operands(head, x)
    vocabulary = VocabularySlice(num_classes=head.num_outputs, axis=head.mesh.axis(AXIS))
    weight = head.weight if head.out_first else head.weight.t()
    return HeadOperands(x, weight, head.bias, vocabulary)
