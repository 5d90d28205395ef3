"""Weight updates of a served model: from a checkpoint or from memory, one part after another.

Parts replaced by faster ones have lost their parameters. A skeleton remains: the original modules without
memory. New values are compared with it before anything changes. Then each part gets its values in a copy of
the skeleton, is packed by its faster replacement, and is freed.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from colossalai.checkpoint_io import ModelLoadPlan, OpenedModel, StoredTensor, fill, opened_tensors
from colossalai.inference.loading._metaseq import fill_from, open_checkpoint
from colossalai.inference.loading._quantized import quantize_stored
from colossalai.inference.loading._skeleton import twin_of, without_memory
from colossalai.inference.products import FasterPart, FastModel, QuantizedLinear, is_packed
from colossalai.tensor import set_spec, spec_of

WeightSource = str | Path | nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Source of new values: a file or folder as for `open_checkpoint`; in memory a model, or tensors by name."""

_CODES = ".codes"


def open_source(source: WeightSource) -> OpenedModel:
    """Open new values, so that their names and shapes are known; collective for files.

    Raises:
        ValueError: `source` is a damaged checkpoint, or contains anything but whole tensors by name.
        OSError: `source` cannot be read.
    """
    from torch.distributed.tensor import DTensor  # in the function: half a second of imports

    if isinstance(source, str | Path):
        return open_checkpoint(source)
    given = dict(source.state_dict() if isinstance(source, nn.Module) else source)
    wrong = [name for name, value in given.items() if not isinstance(value, Tensor) or value.is_meta]
    if wrong:
        raise ValueError(f"new weights are tensors with values, by name; these are none: {', '.join(wrong)}")
    if any(isinstance(value, DTensor) for value in given.values()):
        raise ValueError("new weights are DTensors, each a part of a whole: give full_tensor() of each")
    what = f"the {type(source).__name__} in memory" if isinstance(source, nn.Module) else "what was given"
    return opened_tensors({name: value.detach() for name, value in given.items()}, source=what)


class ServedWeights:
    """The values of a served model, or of this rank's part of it, with updates.

    Args:
        model: The model, before its parts are replaced.
        device: Device of the model.
        is_owned: Whether its parts will be replaced by faster ones.

    Attributes:
        is_partly_updated: Whether an update has failed midway on any rank: some values are new, others old.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, is_owned: bool) -> None:
        self._model = model
        self._device = device
        self._skeleton: nn.Module | None = None
        self._in_codes: nn.Module | None = None
        self._targets: dict[str, nn.Module] = {}
        self.is_partly_updated = False
        quantized = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
        self._way = quantized[0].way if quantized else None
        if is_owned or quantized:
            self._targets = {
                name: part for name, part in model.named_modules() if part._parameters or part._buffers
            }
            sources: dict[nn.Module, nn.Module] = {
                layer: layer.source for layer in quantized if layer.source is not None
            }
            self._skeleton = twin_of(model, without_memory, instead_of=sources)
        if quantized:
            self._in_codes = twin_of(model, without_memory)

    def note_replaced(self, replaced: Mapping[str, FasterPart | FastModel]) -> None:
        """Record the faster replacements of parts, by name."""
        parts = {name: fast for name, fast in replaced.items() if not isinstance(fast, FastModel)}
        self._targets = {
            name: target
            for name, target in (self._targets | parts).items()
            if not any(name.startswith(f"{outer}.") for outer in parts)
        }

    def load(self, source: WeightSource) -> None:
        """Replace all values; collective. The peak memory is the result plus one part.

        Args:
            source: The new values.

        Raises:
            ValueError: `source` does not fit (the message lists all names and shapes) and nothing has
                changed; or, with `is_partly_updated`, it could not be read to its end.
            OSError: `source` cannot be read; nothing has changed.
        """
        was_partly_updated, self.is_partly_updated = self.is_partly_updated, False
        try:
            opened = open_source(source)
            skeleton = self._skeleton
            if self._in_codes is not None and any(name.endswith(_CODES) for name in opened.tensors):
                skeleton = self._in_codes
            fill_from(
                self._model if skeleton is None else skeleton, opened, apply=partial(self._apply, skeleton)
            )
        except BaseException:
            self.is_partly_updated |= was_partly_updated
            raise
        self.is_partly_updated = False  # all ranks have succeeded: `fill_from` exchanges their errors

    def _apply(self, skeleton: nn.Module | None, plan: ModelLoadPlan) -> None:
        if plan.computed:
            raise ValueError(f"{', '.join(plan.computed)} are not tensors, and cannot be replaced")
        self.is_partly_updated = True
        stored = {id(tensor): found for tensor, found in plan.copies}
        num_done = 0
        try:
            if skeleton is None:
                fill(plan.copies)
                return
            parts = dict(skeleton.named_modules())
            with torch.inference_mode():
                for name, target in self._targets.items():
                    self._load_part(target, parts[name], stored)
                    num_done += 1
        except Exception as error:
            new = f"the first {num_done} of {len(self._targets)} parts" if self._targets else "some parts"
            raise ValueError(
                f"the weights could not be replaced to the end, {new} have new values: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _load_part(self, target: nn.Module, part: nn.Module, stored: Mapping[int, StoredTensor]) -> None:
        """Replace the values of one part of the model.

        Args:
            target: The part, or its replacement.
            part: The original part, without memory.
            stored: The new values, by the ids of the tensors of `part`.
        """
        if isinstance(target, QuantizedLinear):
            linear = self._fill_part(part, stored)
            assert isinstance(linear, QuantizedLinear), "it is quantized as it was"
            target.load(linear.weight, linear.bias)
        elif isinstance(target, FasterPart):
            target.load(self._fill_part(part, stored))
        else:
            held = {**target._parameters, **target._buffers}
            like = {**part._parameters, **part._buffers}
            pairs = ((name, stored.get(id(tensor))) for name, tensor in like.items())
            # Buffers outside checkpoints, such as rotary frequencies, may have been moved into a faster part.
            new = {name: found for name, found in pairs if found is not None}
            fill([(own, new[name]) for name, own in held.items() if own is not None and name in new])

    def _fill_part(self, part: nn.Module, stored: Mapping[int, StoredTensor]) -> nn.Module:
        """Return a part of the skeleton with values, which may share memory with the source."""
        holder = nn.Module()
        holder.add_module("part", twin_of(part, lambda tensor: tensor))
        if self._way is not None:
            quantize_stored(holder, self._way, stored)

        def with_values(tensor: Tensor) -> Tensor:
            found = stored.get(id(tensor))
            if found is None:
                return tensor
            values = self._values(tensor, found)
            return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values

        return twin_of(holder.get_submodule("part"), with_values)

    def _values(self, like: Tensor, stored: StoredTensor) -> Tensor:
        """Return this rank's slice of a stored tensor, with the dtype and spec of a tensor without memory."""
        spec, view = spec_of(like), stored.view()
        is_kept = like.dim() < 2 or not is_packed(self._device, like.dtype)
        is_same = view is not None and (view.dtype, view.device) == (like.dtype, self._device)
        if view is not None and is_same and spec is None and not is_kept:
            return view
        made = torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        if spec is not None:
            set_spec(made, spec)
        fill([(made, stored)])
        return made
