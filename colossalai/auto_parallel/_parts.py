"""Parts of a model: the operations before its blocks, in each block, and after them; and its experts.

Only blocks are recomputed, and a pipeline is cut between blocks: predictions sum over these parts. Experts
can be sharded over data-parallel ranks, which then exchange rows of tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from colossalai.auto_parallel.trace._trace import ModelTrace, Operation
from colossalai.runtime import find_blocks
from colossalai.shardformer import expert_parameters


@dataclass(frozen=True, kw_only=True)
class ExpertModule:
    """A module of experts that ranks can share.

    Attributes:
        name: Its full name.
        params: The tensors of its parameters, whose dimension 0 counts experts.
        products: Names of the products of rows with expert matrices, in order.
        rows: Input of the first product: rows of tokens, one for each expert of a token.
        trained: The matrices of all experts that have gradients: parameters, or tensors computed from them.
        is_loop: Whether a rank with all experts computes one expert after the other.
    """

    name: str
    params: tuple[str, ...]
    products: tuple[str, ...]
    rows: str
    trained: tuple[str, ...]
    is_loop: bool


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The operations of a model before its blocks, in each block, and after them.

    Attributes:
        blocks: Full names of the blocks, in the order in which they run.
        before: Names of the operations before the first block.
        within: Names of the operations of each block.
        after: Names of all others.
        inputs: For each block, the tensor that the previous one passes on; empty unless they form a chain.
        outputs: For each block, the tensor that it passes on.
        params: Names of the parameter tensors before the first block, in each block, and after them.
        experts: Modules whose experts ranks can share: all of the model, or none.
        can_be_stages: Whether the blocks form a chain that can be cut into pipeline stages: outputs of a
            block, or of the part before the blocks, are inputs of the next part only.
    """

    blocks: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    within: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    params: tuple[tuple[str, ...], ...] = ()
    experts: tuple[ExpertModule, ...] = ()
    can_be_stages: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether the only input of each block from other blocks is the output of the previous one."""
        return bool(self.inputs)


def parts_of_model(trace: ModelTrace, model: nn.Module) -> ModelParts:
    """Return the parts of a traced model."""
    names = {part: name for name, part in reversed(list(model.named_modules()))}
    order = trace.places
    found = [(names[block], trace.by_module(names[block])) for block in find_blocks(model)]
    found = sorted((each for each in found if each[1]), key=lambda each: order[each[1][0].name])
    if not found:
        everything = tuple(each.name for each in trace.operations)
        return ModelParts(
            after=everything,
            params=((), _params_of(trace, everything)),
            experts=_experts_of(trace, model),
        )
    inside = {operation.name for _, operations in found for operation in operations}
    first = order[found[0][1][0].name]
    outside = [each.name for each in trace.operations if each.name not in inside]
    ends = [_ends(trace, [each.name for each in operations]) for _, operations in found]
    for number, (taken, made) in enumerate(ends):
        if not taken:  # no trained input before it: the batch itself, or a frozen part
            handed = ends[number - 1][1] if number else None
            ends[number] = _inputs_without_gradient(trace, found[number][1], inside, handed), made
    is_chain = all(len(taken) == len(made) == 1 for taken, made in ends) and all(
        before[1] == after[0] for before, after in pairwise(ends)
    )
    before = tuple(name for name in outside if order[name] < first)
    within = tuple(tuple(each.name for each in operations) for _, operations in found)
    after = tuple(name for name in outside if order[name] > first)
    return ModelParts(
        blocks=tuple(name for name, _ in found),
        before=before,
        within=within,
        after=after,
        params=tuple(_params_of(trace, each) for each in (before, *within, after)),
        inputs=tuple(taken[0] for taken, _ in ends) if is_chain else (),
        outputs=tuple(made[0] for _, made in ends) if is_chain else (),
        experts=_experts_of(trace, model),
        can_be_stages=is_chain and _is_passed_on(trace, before, within, [made[0] for _, made in ends]),
    )


def _is_passed_on(
    trace: ModelTrace, before: Sequence[str], within: Sequence[Sequence[str]], made: Sequence[str]
) -> bool:
    """Return whether the inputs of each stage come from the previous stage or are computed from the batch.

    Args:
        trace: The trace.
        before: The operations before the first block.
        within: The operations of each block.
        made: The tensor that each block passes on.
    """
    for tensor, following in zip(made, within[1:], strict=False):
        if tensor in trace.outputs or not {each.name for each in trace.consumers[tensor]} <= {*following}:
            return False
    known = {*before, *within[0]}
    of_params = set(trace.params)  # tensors that depend on parameters: only the stage with these has them
    for operation in (trace.operations[place] for place in sorted(trace.places[name] for name in before)):
        if of_params.isdisjoint(operation.inputs):
            continue
        of_params.update(operation.outputs)
        for tensor in operation.outputs:
            if tensor in trace.outputs or any(each.name not in known for each in trace.consumers[tensor]):
                return False
    return True


def _experts_of(trace: ModelTrace, model: nn.Module) -> tuple[ExpertModule, ...]:
    """Return the experts of a model; none if the rows exchanged by some of them are not in the trace."""
    tensors: dict[str, list[str]] = {}  # by the full names of parameters
    for tensor, name in trace.params.items():
        tensors.setdefault(name, []).append(tensor)
    found = []
    for module, names in expert_parameters(model).items():
        products = [each for each in trace.by_module(module) if "grouped_mm" in each.target]
        if not products:
            return ()
        config = getattr(model.get_submodule(module), "config", None)
        matrices = (each.inputs[1] for each in products)
        found.append(
            ExpertModule(
                name=module,
                params=tuple(tensor for name in names for tensor in tensors.get(name, ())),
                products=tuple(each.name for each in products),
                rows=products[0].inputs[0],
                trained=tuple(each for each in matrices if carries_gradient(trace, each)),
                is_loop=getattr(config, "_experts_implementation", None) == "eager",
            )
        )
    return tuple(found)


def _params_of(trace: ModelTrace, operations: Iterable[str]) -> tuple[str, ...]:
    """Return the parameter tensors among the inputs of some operations, each once."""
    own = (trace.operations[place] for place in sorted(trace.places[name] for name in operations))
    return tuple(dict.fromkeys(name for each in own for name in each.inputs if name in trace.params))


def _ends(trace: ModelTrace, operations: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the inputs of some operations that have gradients, and their outputs that others use."""
    inside = set(operations)
    own = [each for each in trace.operations if each.name in inside]
    made = {name for each in own for name in each.outputs}
    taken = [
        name
        for each in own
        for name in each.inputs
        if name not in made and name not in trace.outside and carries_gradient(trace, name)
    ]
    handed = [
        name
        for each in own
        for name in each.outputs
        if name in trace.outputs or any(other.name not in inside for other in trace.consumers[name])
    ]
    return list(dict.fromkeys(taken)), list(dict.fromkeys(handed))


def _inputs_without_gradient(
    trace: ModelTrace, operations: Sequence[Operation], inside: Collection[str], handed: Sequence[str] | None
) -> list[str]:
    """Return the tensors without gradients that could be the hidden state a block computes on.

    Args:
        trace: The trace.
        operations: The operations of the block.
        inside: Names of the operations of all blocks: several blocks use masks and positions.
        handed: Outputs of the previous block. None: this is the first block.
    """
    own = {each.name for each in operations}
    made = {name for each in operations for name in each.outputs}
    known = {*trace.params, *trace.buffers, *trace.constants, *made}
    found = dict.fromkeys(
        name
        for each in operations
        for name in each.inputs
        if name not in known and trace.tensors[name].dtype.is_floating_point
    )
    if handed is not None:
        return [name for name in found if name in handed]
    alone = [name for name in found if {each.name for each in trace.consumers[name]} & {*inside} <= own]
    return alone or list(found)


def carries_gradient(trace: ModelTrace, name: str) -> bool:
    """Whether a tensor depends on a trained parameter; masks and positions do not."""
    waiting, seen = [name], set()
    while waiting:
        each = waiting.pop()
        if each in trace.trainable:
            return True
        producer = trace.producers.get(each)
        if producer is not None and producer.name not in seen and producer.is_grad_enabled:
            seen.add(producer.name)
            waiting += [taken for taken in producer.inputs if trace.tensors[taken].dtype.is_floating_point]
    return False


def params_in_gradient(trace: ModelTrace, output: str) -> set[str]:
    """Return the parameter tensors that have a gradient if one output has."""
    waiting, found, seen = [output], set[str](), set[str]()
    while waiting:
        each = waiting.pop()
        if each in trace.params and each in trace.trainable:
            found.add(each)
        producer = trace.producers.get(each)
        if producer is None or producer.name in seen or not producer.is_grad_enabled:
            continue
        seen.add(producer.name)
        if "detach" not in producer.target:
            waiting += [taken for taken in producer.inputs if trace.tensors[taken].dtype.is_floating_point]
    return found


def losses_of(trace: ModelTrace) -> list[str]:
    """Return the outputs that a loss can be computed from: those of one element, or all floating ones."""
    floating = [name for name in trace.outputs if trace.tensors[name].dtype.is_floating_point]
    return [name for name in floating if trace.tensors[name].numel == 1] or floating


def may_lack_gradients(trace: ModelTrace) -> bool:
    """Whether some parameter gets no gradient from the loss of one output."""
    storages = {trace.storage_of(name) for name in trace.params if name in trace.trainable}
    return any(
        not storages <= {trace.storage_of(name) for name in params_in_gradient(trace, output)}
        for output in losses_of(trace)
    )


def zero_stages_of(trace: ModelTrace, model: nn.Module, parts: ModelParts) -> frozenset[int]:
    """Return the ZeRO stages under which data-parallel ranks can train a model without a pipeline.

    `DistributedDataParallel` waits for the gradient of each parameter. ZeRO does not support sparse
    gradients. In stage 3, parameters are gathered while their block runs, so each belongs to one block.
    """
    is_sparse = any(
        isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse for each in model.modules()
    )
    if is_sparse:
        return frozenset((0,))
    found = {0, 1, 2, 3}
    if may_lack_gradients(trace):
        found.remove(0)
    if _blocks_share_params(trace, parts):
        found.remove(3)
    return frozenset(found)


def _blocks_share_params(trace: ModelTrace, parts: ModelParts) -> bool:
    """Whether a parameter of a block also belongs to another module, or is used outside of the block."""
    block_of = {
        name: number for number, operations in enumerate(parts.within) for name in operations
    }  # by operation
    users: dict[str, set[int | None]] = {}
    for tensor, full in trace.params.items():
        owners = {number for number, block in enumerate(parts.blocks) if full.startswith(f"{block}.")}
        places = users.setdefault(trace.storage_of(tensor), set())
        places |= owners or {None}
        places |= {block_of.get(each.name) for each in trace.consumers[tensor]}
    return any(len(places) > 1 for places in users.values())
