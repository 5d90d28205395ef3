"""A stage made of a whole model: the model's own forward, with stand-ins for what other stages hold."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from colossalai.pipeline.stages._placeholders import Flow, StageEnd, pack, unpack
from colossalai.pipeline.stages._stage import PipelineStage
from colossalai.pipeline.stages._trace import as_arguments


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages hold a copy of, and whose gradients are to be summed over them.

    Attributes:
        names: All its names in the whole model; a stage may know it by some of them only.
        stages: The stages that hold it, in ascending order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


class PartOfStack(nn.ModuleList):
    """The blocks of a stage in the place of all blocks of the model; theirs are the numbers in the whole.

    Sub-modules are the own blocks only. Whoever iterates over it or indexes it, as the model's forward does,
    finds all blocks, those of other stages as stand-ins.

    Args:
        blocks: All blocks, by name in the stack, in order.
        own: The names of the own ones.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], own: Sequence[str]) -> None:
        super().__init__()
        self._all_blocks = tuple(blocks.values())  # a tuple: not sub-modules
        for name in own:
            self.add_module(name, blocks[name])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._all_blocks)

    def __len__(self) -> int:
        return len(self._all_blocks)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._all_blocks[index]
        return list(chosen) if isinstance(index, slice) else chosen

    def forward(self, received: Any) -> Any:
        """Call all blocks one after the other, as the `nn.Sequential` does that may stand in this place."""
        for block in self._all_blocks:
            received = block(received)
        return received


class ModelStage(PipelineStage):
    """One stage of a model that was not written for pipelines; see `cut_model`.

    Its sub-modules and parameters are those of the model that this stage holds, under their names in the
    whole model; other attributes (`config`) are those of the model.

    Args:
        model: The model, with stand-ins for what other stages hold.
        flow: What the stand-ins share.
        index: The number of the stage.
        num_stages: The number of stages of the model.
        last_block: The name of the last block of this stage.
        ties: The parameters of this stage that other stages hold, too.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: Flow,
        *,
        index: int,
        num_stages: int,
        last_block: str,
        ties: tuple[Tie, ...],
    ) -> None:
        super().__init__()
        self.training = model.training
        self.index = index
        self.num_stages = num_stages
        self.ties = ties
        self._last_block = last_block
        self._flow = flow
        self._no_cache = "use_cache" in inspect.signature(model.forward).parameters
        object.__setattr__(self, "_model", model)
        # The same dictionaries: this is how the parts of the model are named without a prefix.
        for held in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, held, getattr(model, held))

    @property
    def model(self) -> nn.Module:
        """The model with stand-ins for what other stages hold; it shares its modules with this stage."""
        model: nn.Module = self.__dict__["_model"]
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None:  # it is being copied
                raise
            return getattr(model, name)

    def train(self, mode: bool = True) -> "ModelStage":
        """Set training mode, also of the model itself, which is no sub-module."""
        super().train(mode)
        self.__dict__["_model"].training = mode
        return self

    def forward(self, received: Any, data: Any) -> Any:
        """Run the model up to the last block of this stage; on the last stage, to its end.

        Args:
            received: What the stage before returned; None on the first stage.
            data: The data of the microbatch: a dict of keyword arguments of the model, a tuple of
                positional ones, or the first argument. The same on every stage.

        Returns:
            What the last block of the stage returns, as `pack` puts it; on the last stage what the model
            returns.

        Raises:
            RuntimeError: The forward of the model has not come to the last block of this stage.
            ValueError: A block returns something that cannot be sent to the next stage.
        """
        args, kwargs = as_arguments(data)
        if self._no_cache:  # of keys and values, for generation: it would hold this stage's only
            kwargs.setdefault("use_cache", False)
        self._flow.received = unpack(received)
        try:
            output = self.__dict__["_model"](*args, **kwargs)
        except StageEnd as end:
            return pack(end.output, block=self._last_block)
        finally:
            self._flow.received = None
            self._flow.has_reached_blocks = False
        if self.index < self.num_stages - 1:
            raise RuntimeError(
                f"the forward of the model ended without calling block {self._last_block!r}: a model that "
                "leaves out blocks (LayerDrop) cannot be cut"
            )
        return output


def tied_parameters(model: nn.Module) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return the parameters of cut models that other stages hold, too, each with all stages that hold it.

    All stages that share a parameter find it in the same order. Parameters are looked up by name now: they
    may have been replaced since the model was cut.

    Args:
        model: What `cut_model` returned, or any other module, which has none.
    """
    found: dict[Tie, nn.Parameter] = {}
    for stage in model.modules():
        if isinstance(stage, ModelStage):
            named = dict(stage.named_parameters(remove_duplicate=False))
            for tie in stage.ties:
                found[tie] = next(named[name] for name in tie.names if name in named)
    return [(found[tie], tie.stages) for tie in sorted(found, key=lambda tie: tie.names)]


def end_stage(module: nn.Module, args: Any, output: Any) -> None:
    """End the forward of the model; the forward hook of a stage's last block."""
    raise StageEnd(output)


class NoteBlocks:
    """The forward pre-hook of a stage's first block: tells the stand-ins that the blocks have been reached.

    Args:
        flow: What the stand-ins share.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note it."""
        self._flow.has_reached_blocks = True
