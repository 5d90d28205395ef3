"""Blocks that are recomputed as one: the same losses, gradients and random numbers, or an error in words."""

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.context import ParallelMode, random_state, seed, set_random_state
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.runtime import RecomputeSegment, Segments, apply_recompute, removable_recompute
from tests.shardformer.models import gemma3, gpt2_of_four_blocks, language_loss, llama, t5

WIDTH = 6
NESTED = RecomputeSegment(0, 6, (RecomputeSegment(1, 5, (RecomputeSegment(1, 3),)),))
CHOICES = {
    "one": [RecomputeSegment(1, 4)],
    "two": [RecomputeSegment(0, 3), RecomputeSegment(3, 6)],
    "of one block": [RecomputeSegment(0, 1), RecomputeSegment(2, 3)],
    "three deep": [NESTED],
    "in the last place": [RecomputeSegment(0, 4, (RecomputeSegment(2, 4, (RecomputeSegment(2, 3),)),))],
}
TIMES = {  # that each block runs forward
    "one": [1, 2, 2, 2, 1, 1],
    "two": [2, 2, 2, 2, 2, 2],
    "of one block": [2, 1, 2, 1, 1, 1],
    "three deep": [2, 4, 4, 3, 3, 2],
    "in the last place": [2, 2, 3, 2, 1, 1],
}


class Block(nn.Module):
    """Draws from two random states; takes arguments that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        with seed(ParallelMode.TENSOR):
            x = nn.functional.dropout(x)
        x = torch.tanh(self.fc(x)) * scale
        return nn.functional.dropout(x if mask is None else x * mask)


class TupleBlock(Block):
    """Returns the mask beside the hidden state, for the next block."""

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> tuple[Any, ...]:
        return super().forward(x, mask, scale=scale), mask, scale


class Net(nn.Module):
    """Calls its blocks in one way or another."""

    def __init__(self, way: Callable[[Any, Tensor, Tensor], Tensor], kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(6))
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.blocks, x, torch.sigmoid(self.gate(x)))


def alone(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def by_keyword(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, mask=mask, scale=1.5)
    return x


def by_tuples(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    scale = 1.5
    for block in blocks:
        x, mask, scale = block(x, mask, scale=scale)
    return x


WAYS = {"alone": (alone, Block), "by keyword": (by_keyword, Block), "by tuples": (by_tuples, TupleBlock)}


def names_of(model: nn.Module, stack: str = "blocks") -> tuple[str, ...]:
    return tuple(f"{stack}.{number}" for number, _ in enumerate(model.get_submodule(stack)))


def segmented(model: nn.Module, *segments: RecomputeSegment, stack: str = "blocks") -> nn.Module:
    return apply_recompute(model, Segments(segments, names_of(model, stack)))


def trained(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """Return loss, gradients and the random numbers behind; the state is then as it was before."""
    kept = random_state()
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    found = [loss.detach(), *(param.grad for param in model.parameters()), torch.rand(3)]
    set_random_state(kept)
    return [each.clone() for each in found if each is not None]


def check(model: nn.Module, twin: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
    found, expected = trained(model, loss_of), trained(twin, loss_of)
    assert len(found) == len(expected) > 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("choice", CHOICES)
def test_everything_is_the_same_bit_for_bit(choice: str, way: str) -> None:
    model = Net(*WAYS[way]).double()
    twin = copy.deepcopy(model)
    segmented(model, *CHOICES[choice])
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    for times in (1, 2):  # nothing is left of the first
        check(model, twin, lambda model: model(x).sum())
        assert [block.calls for block in model.blocks] == [times * each for each in TIMES[choice]]
    assert list(model.state_dict()) == list(twin.state_dict())
    assert str(model) == str(twin)


def gpt() -> nn.Module:
    sizes = {"hidden_size": 8, "num_layers": 4, "num_attention_heads": 2, "vocab_size": 25}
    return GPT(GPTConfig(**sizes, max_position_embeddings=8))


MODELS = {
    "GPT": (gpt, "blocks"),
    "GPT-2": (gpt2_of_four_blocks, "transformer.h"),
    "Llama": (llama, "model.layers"),
}


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("name", MODELS)
def test_language_models(name: str) -> None:
    pytest.importorskip("transformers")
    build, stack = MODELS[name]
    model = build().double().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.25
    twin = copy.deepcopy(model)
    num_blocks = len(model.get_submodule(stack))
    segmented(model, RecomputeSegment(0, num_blocks, (RecomputeSegment(0, num_blocks - 1),)), stack=stack)
    ids = torch.arange(14).reshape(2, 7)

    def loss_of(model: nn.Module) -> Tensor:
        output = model(ids, attention_mask=(ids > 1).long())
        return language_loss(output, ids) if name != "GPT" else output.logsumexp(-1).sum()

    check(model, twin, loss_of)
    with torch.no_grad():
        assert torch.equal(loss_of(model.eval()), loss_of(twin.eval()))


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
def test_hooks_of_blocks_see_what_the_blocks_do() -> None:
    model = Net(alone)
    segmented(model, RecomputeSegment(0, 3))
    seen: list[tuple[int, bool]] = []
    handed: dict[int, Tensor] = {}

    def before(number: int, block: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append((number, number == 0 or torch.equal(args[0], handed[number - 1])))

    def behind(number: int, block: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        handed[number] = output.detach().clone()

    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(partial(before, number))
        block.register_forward_hook(partial(behind, number))
    loss = model(torch.randn(4, WIDTH)).sum()
    assert seen == [(number, True) for number in range(6)]
    seen.clear()
    loss.backward()
    assert seen == [(0, True), (1, True), (2, True)]


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
def test_without_gradients_or_in_evaluation_blocks_run_as_they_are() -> None:
    model = segmented(Net(alone), RecomputeSegment(0, 6))
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        model(x)
    model.eval()(x).sum().backward()
    assert [block.calls for block in model.blocks] == [2] * 6
    model.train().way = with_an_operation  # which blocks that run as one would refuse
    with torch.no_grad():
        model(x)


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
def test_a_copy_runs_its_own_blocks() -> None:
    model = segmented(Net(alone).double(), NESTED)
    twin = copy.deepcopy(model)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    check(model, twin, lambda model: model(x).sum())
    assert [block.calls for block in twin.blocks] == [block.calls for block in model.blocks]
    assert type(twin.blocks[0]) is type(model.blocks[1])


def looks_of(model: nn.Module) -> list[Any]:
    """Return what recomputation changes of modules."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
    return [
        (type(part), part.__dict__.keys(), part.forward, [list(vars(part)[name].values()) for name in hooks])
        for part in model.modules()
    ]


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("choice", CHOICES)
def test_what_is_removed_leaves_nothing(choice: str) -> None:
    model = Net(alone).double()
    model.blocks[2].forward = partial(model.blocks[2].forward, scale=1.5)  # one of its own, which stays
    before, twin = looks_of(model), copy.deepcopy(model)
    handle = removable_recompute(model, Segments(tuple(CHOICES[choice]), names_of(model)))
    assert looks_of(model) != before
    other, handle_of_other = copy.deepcopy((model, handle))
    handle.remove()
    assert looks_of(model) == before
    handle.remove()  # does nothing
    assert looks_of(model) == before
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    check(model, twin, lambda model: model(x).sum())
    assert [block.calls for block in model.blocks] == [1] * 6
    check(other, twin, lambda model: model(x).sum())  # the copy is as it was
    assert [block.calls for block in other.blocks] == TIMES[choice]
    handle_of_other.remove()
    check(other, twin, lambda model: model(x).sum())
    assert [block.calls for block in other.blocks] == [1 + times for times in TIMES[choice]]


class NormedBlock(nn.Module):
    """Follows batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x))


@pytest.mark.unit
def test_batch_norms_count_a_batch_once() -> None:
    model = nn.Sequential(*(NormedBlock() for _ in range(4)))
    twin, before = copy.deepcopy(model), looks_of(model)
    x = torch.randn(4, WIDTH)
    for _ in range(2):
        segments = Segments((RecomputeSegment(0, 1), RecomputeSegment(1, 3)), tuple("0123"))
        handle = removable_recompute(model, segments)
        for each in (model, twin):
            each(x).sum().backward()
        assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
        handle.remove()
        assert looks_of(model) == before


@pytest.mark.unit
def test_blocks_are_in_one_segment_at_a_time() -> None:
    model = Net(alone)
    handle = removable_recompute(model, Segments((RecomputeSegment(1, 3),), names_of(model)))
    with pytest.raises(
        ValueError, match=r"'blocks\.1' is in a segment already: take the one before off first"
    ):
        segmented(model, RecomputeSegment(0, 3))
    handle.remove()
    segmented(model, RecomputeSegment(0, 3))


def with_an_operation(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for block in blocks:
        x = block(x) + 1
    return x


def with_all_outputs(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    states = []
    for block in blocks:
        x = block(x)
        states.append(x)
    return torch.stack(states)


def with_another_input(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for block in blocks:
        block(x)
    return x


def with_changing_masks(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, mask * 2)
    return x


def with_changing_scales(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    for number, block in enumerate(blocks):
        x = block(x, scale=number / 2)
    return x


def with_more_arguments(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = blocks[0](x)
    return blocks[1](x, mask)


def with_everything_by_keyword(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    return blocks[0](x=x)


def in_another_order(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    return blocks[2](blocks[0](x))


def without_the_last(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    return blocks[1](blocks[0](x))


def twice(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    return alone(blocks, alone(blocks, x, mask), mask)


def with_own_values(blocks: Any, x: Tensor, mask: Tensor) -> Tensor:
    return blocks[1](blocks[0](x)[0])[0]


class AlsoReturnsASum(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x.sum()


class ReturnsADict(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": super().forward(x)}


REFUSED = [
    (with_an_operation, Block, r"the model uses \(aten\.add\.Tensor\) the output between two blocks"),
    (with_all_outputs, Block, r"the model uses \(aten\.stack\.default\) the output between two blocks"),
    (with_another_input, Block, r"'blocks\.1' does not get the output of 'blocks\.0', as it is"),
    (with_changing_masks, Block, r"argument 2 is another one for 'blocks\.1' than for 'blocks\.0'"),
    (with_changing_scales, Block, r"scale is another one for 'blocks\.1' than for 'blocks\.0'"),
    (with_more_arguments, Block, r"'blocks\.1' is called with other arguments than 'blocks\.0'"),
    (with_everything_by_keyword, Block, r"'blocks\.0' is called without a tensor as its first positional"),
    (in_another_order, Block, r"'blocks\.2' is called behind 'blocks\.0', instead of 'blocks\.1'"),
    (without_the_last, Block, r"'blocks\.2' is not called after the block before it"),
    (twice, Block, r"'blocks\.0' is called twice in a forward"),
    (with_own_values, AlsoReturnsASum, r"'blocks\.0' returns a Tensor of its own as element 1 of a tuple"),
    (alone, ReturnsADict, r"'blocks\.0' returns a dict, not a tensor or a tuple"),
]


@pytest.mark.unit
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("way", "kind", "message"), REFUSED)
def test_what_cannot_run_as_one_is_said(way: Callable[..., Tensor], kind: type[Block], message: str) -> None:
    model = segmented(Net(way, kind), RecomputeSegment(0, 3))
    x = torch.randn(4, WIDTH)
    with pytest.raises(RuntimeError, match=rf"{message}.*segments of one block each"):
        model(x)
    if kind is Block:  # the next forward is not disturbed by it
        model.way = alone
        model(x).sum().backward()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "stack", "message"),
    [
        (gemma3, "model.layers", r"(attention_mask|position_embeddings) is another one for"),
        (lambda: t5().model, "encoder.block", r"block\.0' returns a .* of its own as element"),
    ],
)
def test_models_whose_blocks_differ_are_refused(
    build: Callable[[], nn.Module], stack: str, message: str
) -> None:
    pytest.importorskip("transformers")
    model = build().train()
    ids = torch.arange(12).reshape(2, 6)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    whole = RecomputeSegment(0, len(model.get_submodule(stack)))
    with pytest.raises(RuntimeError, match=rf"cannot be recomputed as one segment: .*{message}"):
        segmented(model, whole, stack=stack)(input_ids=ids, **more)


@pytest.mark.unit
def test_lists_for_json() -> None:
    segments = Segments((*CHOICES["one"], RecomputeSegment(4, 6, (RecomputeSegment(4, 5),))), tuple("abcdef"))
    lists = segments.as_lists()
    assert lists == [[[1, 4, []], [4, 6, [[4, 5, []]]]], ["a", "b", "c", "d", "e", "f"]]
    assert Segments.from_lists(json.loads(json.dumps(lists))) == segments
    assert segments.names_by_segment == (("b", "c", "d"), ("e", "f"))
    for wrong in ([[1, 2]], [[[1, 2]], ["a", "b"]], [[], [1]]):
        with pytest.raises(ValueError, match="it must be "):
            Segments.from_lists(wrong)


@pytest.mark.unit
def test_values_that_are_no_segments() -> None:
    with pytest.raises(ValueError, match="from block 2 up to, and without, block 2 has no block"):
        RecomputeSegment(2, 2)
    with pytest.raises(
        ValueError, match=r"the segment from 0 to 2 begins before 1 .* the segment from 1 to 4"
    ):
        RecomputeSegment(1, 4, (RecomputeSegment(0, 2),))
    with pytest.raises(ValueError, match="the segment from 1 to 4 is in one of the same blocks"):
        RecomputeSegment(1, 4, (RecomputeSegment(1, 4),))
    with pytest.raises(
        ValueError, match=r"the segment from 1 to 3 begins before 2 or .* a chain of 3 blocks"
    ):
        Segments((RecomputeSegment(0, 2), RecomputeSegment(1, 3)), ("a", "b", "c"))
    with pytest.raises(ValueError, match="ends behind 3 in a chain of 3 blocks"):
        Segments((RecomputeSegment(0, 4),), ("a", "b", "c"))
    with pytest.raises(ValueError, match="the block 'a' is in the chain twice"):
        Segments((), ("a", "b", "a"))


@pytest.mark.unit
def test_blocks_that_are_no_chain() -> None:
    whole = (RecomputeSegment(0, 2),)
    model = Net(alone)
    with pytest.raises(ValueError, match=r"'block\.1', which is not a sub-module; there are \['blocks'"):
        apply_recompute(model, Segments(whole, ("blocks.0", "block.1")))
    with pytest.raises(ValueError, match=r"recompute names 'blocks', a ModuleList, which is never called"):
        apply_recompute(model, Segments(whole, ("blocks", "gate")))
    with pytest.raises(ValueError, match=r"the block 'blocks\.0\.fc' is inside of 'blocks\.0'"):
        apply_recompute(model, Segments(whole, ("blocks.0", "blocks.0.fc")))
    model.blocks[1] = model.blocks[0]
    with pytest.raises(ValueError, match=r"'blocks\.0' and 'blocks\.1' are one block, which the model calls"):
        segmented(model, RecomputeSegment(0, 2))
    assert all(type(block) is Block for block in model.blocks)  # nothing was changed
