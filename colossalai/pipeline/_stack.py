"""Where a model has its stack of blocks, and what lies beside the way to it."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_CHAINS = (nn.ModuleList.forward, nn.Sequential.forward)


@dataclass(frozen=True)
class Anatomy:
    """How a model is laid out around its stack of blocks.

    Attributes:
        stack: The name of the stack.
        block_names: The names of the blocks in the stack ("0", "1", ...).
        containers: The names of the modules that contain the stack, the model itself ("") first.
        before: The names of the parts beside the stack that are registered before it: modules that are
            children of a container, and parameters that are a container's own.
        behind: The same of those registered after it.
    """

    stack: str
    block_names: tuple[str, ...]
    containers: tuple[str, ...]
    before: tuple[str, ...]
    behind: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_names)

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts beside the stack."""
        return self.before + self.behind


def dissect(model: nn.Module, stack: str | None = None) -> Anatomy:
    """Find the stack of blocks of a model and what lies beside it.

    Args:
        model: The model.
        stack: The name of the stack; by default, of the outermost `nn.ModuleList`s and `nn.Sequential`s of
            modules of one class with parameters, the longest.

    Raises:
        ValueError: There is none, or `stack` is none.
    """
    stacks = dict(_stacks(model, ""))
    if stack is None:
        if not stacks:
            raise ValueError(
                f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks of one class along "
                "which it could be cut: name one with stack=, or cut it with build_pipeline_model (an "
                "nn.Sequential), with PipelinableContext, or by hand"
            )
        stack = max(stacks, key=lambda name: len(stacks[name]._modules))
    chosen = dict(model.named_modules()).get(stack)
    if chosen is None or not _is_chain(chosen):
        raise ValueError(
            f"{stack!r} is not an nn.ModuleList or nn.Sequential of different modules inside the model; "
            f"found are {list(stacks)}"
        )
    before: list[str] = []
    behind: list[str] = []
    containers = [""]
    container = model
    for step in stack.split("."):
        prefix = f"{containers[-1]}." if containers[-1] else ""
        before += [prefix + name for name, param in container._parameters.items() if param is not None]
        children = [name for name, child in container._modules.items() if child is not None]
        place = children.index(step)
        before += [prefix + name for name in children[:place]]
        behind += [prefix + name for name in children[place + 1 :]]
        container = container.get_submodule(step)
        containers.append(prefix + step)
    return Anatomy(stack, tuple(chosen._modules), tuple(containers[:-1]), tuple(before), tuple(behind))


def _stacks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost stacks of blocks, by name."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if _is_chain(child) and _is_uniform(child):
            yield full_name, child
        else:
            yield from _stacks(child, full_name)


def _is_chain(module: nn.Module) -> bool:
    members = list(module._modules.values())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and type(module).forward in _CHAINS
        and len({id(member) for member in members}) == len(members)
    )


def _is_uniform(module: nn.Module) -> bool:
    members = list(module.children())
    if len(members) < 2 or len({type(member) for member in members}) > 1:
        return False
    return next(members[0].parameters(), None) is not None
