"""Trial run of a model on fake tensors, which shows the parts used before and after its blocks.

It computes nothing and takes no memory. The order of registration does not show it: OPT registers its last
norm before the blocks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from colossalai.pipeline.stages._placeholders import copy_with, new_like
from colossalai.pipeline.stages._stage import as_arguments
from colossalai.tensor import built_for, spec_of

_IDS = ("input_ids", "tokens", "ids")
_IMAGES = ("pixel_values", "images", "image", "x")


@dataclass(frozen=True)
class Trial:
    """Result of a trial run.

    Attributes:
        used_at: For each parameter, by each of its names, the times of its uses outside of its own block: the
            number of blocks before them, 0 before the first one. Parameters of unused parts have no entry.
        feeding: The part that returned the same tensor that the first block takes; empty if none did.
        skipped_over: Blocks that take the output of a block earlier than the previous one, both by index.
        repeated: Blocks that run again after themselves or a later one, by index.
        fitting: The parts that returned a tensor of the shape of the first block's input.
    """

    used_at: Mapping[str, frozenset[int]]
    feeding: str
    skipped_over: tuple[tuple[int, int], ...]
    repeated: tuple[int, ...] = ()
    fitting: frozenset[str] = frozenset()


def run_trial(model: nn.Module, sample: Any, *, stack: str, parts: Sequence[str]) -> Trial:
    """Run the forward of a model in evaluation mode on fake tensors.

    Args:
        model: The model, on any device, the meta device included.
        sample: Data as the loader gives it: a tensor, a tuple of arguments or a dict of keyword arguments.
        stack: The name of its stack of blocks.
        parts: The names of the modules outside of the stack whose outputs are recorded.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        twin = copy_with(model, lambda tensor: new_like(tensor, "cpu")).eval()
        _untie(twin)
        args, kwargs = as_arguments(tree_map(_fake, sample))
        watch = _Watch(twin, list(twin.get_submodule(stack)._modules.values()), parts)
        with torch.no_grad(), watch:
            twin(*args, **kwargs)
    return watch.result()


def can_try(model: nn.Module) -> bool:
    """Return whether a trial run is possible; tensor-parallel layers would communicate."""
    return all(_is_whole(param) for param in model.parameters())


def shares_activations(model: nn.Module) -> bool:
    """Return whether ranks share the activations of a model's blocks, which communicate (`dap`)."""
    return any(extents.get("dap", 1) > 1 for _, _, extents in built_for(model))


def guess_sample(model: nn.Module, argument: str) -> Any:
    """Return data for a trial run of a model that takes token ids or images, None if it is of neither kind.

    Args:
        model: The model; for images, with their size in its `config`.
        argument: The first argument of its forward, unless its class names a main input.
    """
    name = getattr(model, "main_input_name", argument)
    if name in _IDS:
        return {name: torch.zeros(1, 2, dtype=torch.long)}
    config = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name in _IMAGES and isinstance(channels, int) and isinstance(size, int | tuple | list):
        height, width = (size, size) if isinstance(size, int) else size
        return {name: torch.zeros(1, channels, height, width)}
    return None


@dataclass
class _Progress:
    """Progress of a forward.

    Attributes:
        num_done: Number of blocks that have been called and have returned.
        running: The index of the running block, None between blocks.
        producers: By the identity of a tensor, the last block that returned it.
        skipped_over: See `Trial`.
        repeated: See `Trial`.
        outputs: By the identity of a tensor, the recorded part that returned it.
        shapes: By the name of a recorded part, the shape of its output.
        feeding: See `Trial`.
        fitting: See `Trial`.
        kept: References to tensors, so that no two of them have the same identity.
    """

    num_done: int = 0
    running: int | None = None
    producers: dict[int, int] = field(default_factory=dict)
    skipped_over: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    outputs: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    feeding: str = ""
    fitting: frozenset[str] = frozenset()
    kept: list[Any] = field(default_factory=list)


class _Watch(TorchDispatchMode):
    """Records every operation on parameters, and every call of a block.

    Args:
        twin: The model on fake tensors.
        blocks: Its blocks.
        parts: Names of the modules whose outputs are recorded.
    """

    def __init__(self, twin: nn.Module, blocks: Sequence[Any], parts: Sequence[str]) -> None:
        super().__init__()
        own = {id(param): number for number, block in enumerate(blocks) for param in block.parameters()}
        self._home_of = own
        self._names = {id(param): name for name, param in twin.named_parameters()}
        self._used_at: dict[str, set[int]] = {}
        self._progress = _Progress()
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(number), with_kwargs=True)
            block.register_forward_hook(self._after(number))
        for name in parts:
            twin.get_submodule(name).register_forward_hook(self._after_part(name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record its parameters, unless it only reads a property."""
        if func.namespace == "c10d":
            raise RuntimeError(f"the forward communicates ({func}), which a trial run on fake tensors cannot")
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._names:
                    self._note(leaf)
        return result

    def result(self) -> Trial:
        """Return the result of the trial run."""
        seen = self._progress
        used_at = {name: frozenset(at) for name, at in self._used_at.items()}
        return Trial(
            used_at, seen.feeding, tuple(seen.skipped_over), tuple(seen.repeated), fitting=seen.fitting
        )

    def _note(self, param: torch.Tensor) -> None:
        progress = self._progress
        if self._home_of.get(id(param), -1) != progress.running or progress.running is None:
            at = self._used_at.setdefault(self._names[id(param)], set())
            # A block that uses a parameter of another part counts as a use before and after it.
            at.add(progress.num_done)
            if progress.running is not None:
                at.add(progress.num_done + 1)

    def _before(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            progress = self._progress
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if number < progress.num_done:
                progress.repeated.append(number)
            elif number == 0:
                progress.feeding = next((progress.outputs.get(id(leaf), "") for leaf in leaves), "")
                progress.fitting = frozenset(
                    name for name, shape in progress.shapes.items() if leaves and shape == leaves[0].shape
                )
            for leaf in leaves:
                source = progress.producers.get(id(leaf), number - 1)
                if source < number - 1:
                    progress.skipped_over.append((source, number))
            progress.running = number

        return hook

    def _after(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._progress.running = None
            self._progress.num_done = number + 1
            self._progress.kept.append(output)
            self._progress.producers.update(
                {id(leaf): number for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
            )

        return hook

    def _after_part(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._progress.kept.append(output)
            if isinstance(output, torch.Tensor):
                self._progress.outputs[id(output)] = name
                self._progress.shapes[name] = output.shape

        return hook


def _untie(module: nn.Module) -> None:
    """Give every name its own parameter, so that each use identifies the name."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                part._parameters[name] = nn.Parameter(torch.empty_like(param), param.requires_grad)


def _fake(leaf: Any) -> Any:
    return new_like(leaf, "cpu") if isinstance(leaf, torch.Tensor) else leaf


def _is_whole(param: nn.Parameter) -> bool:
    spec = spec_of(param)
    return spec is None or spec.is_identity


_CHAINS = (nn.ModuleList.forward, nn.Sequential.forward)


@dataclass(frozen=True)
class Anatomy:
    """Layout of a model around its stack of blocks.

    Attributes:
        stack: The name of the stack.
        block_names: The names of the blocks in the stack ("0", "1", ...).
        containers: The names of the modules that contain the stack, the model itself ("") first.
        before: The names of the parts outside of the stack that are registered before it: modules that are
            children of a container, and parameters that are a container's own.
        behind: The same for the parts registered after it.
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
        """All parts outside of the stack."""
        return self.before + self.behind


def dissect(model: nn.Module, stack: str | None = None) -> Anatomy:
    """Find the stack of blocks of a model and the parts around it.

    Args:
        model: The model.
        stack: The name of the stack; by default, of the outermost `nn.ModuleList`s and `nn.Sequential`s of
            modules of one class with parameters, the longest.

    Raises:
        ValueError: `model` has no stack of blocks, or `stack` does not name one.
    """
    stacks = dict(_stacks(model, ""))
    if stack is None:
        if not stacks:
            raise ValueError(
                f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of blocks of one class along "
                "which it could be cut: name one to colossalai.pipeline.cut_model (stack='...'), or cut it "
                "with build_pipeline_model (an nn.Sequential), with PipelinableContext, or by hand, and give "
                "the stages of this rank in place of the model"
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
