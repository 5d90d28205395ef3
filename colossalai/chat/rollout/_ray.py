"""Rollouts in a process of Ray, on a machine chosen by Ray: weights are sent there, answers come back.

Each rank has its own actor. A sync sends whole tensors one after another, with two in flight at most. Ray
must be running: `ray start --head` on one machine, `ray start --address ...` on the others.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.chat.rollout._sampler import LocalSampler, Rollout, Sampler
from colossalai.chat.rollout._weights import EngineWeights, WeightStream, names_of_tensors
from colossalai.cluster import gather_values
from colossalai.inference import SamplingParams

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RolloutActor:
    """Actor in Ray's process: a model, loaded tensor by tensor, and its sampler.

    Args:
        config: Config of transformers.
        dtype: Name of the dtype of the parameters.
        tokenizer: The tokenizer of the model.
        options: Options of the engine.
    """

    def __init__(self, config: Any, dtype: str, tokenizer: Any, options: Mapping[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        device = torch.device("cpu")
        if torch.accelerator.is_available():  # Ray limits an actor to its assigned devices
            device = torch.device(torch.accelerator.current_accelerator() or "cpu")
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self._model = model.requires_grad_(False).eval()
        self._named = dict(self._model.state_dict(keep_vars=True))
        self._sampler = LocalSampler(self._model, tokenizer, **options)

    def load(self, name: str, bits: Any, dtype: str) -> None:
        """Copy the values of a tensor from an array of integers of the same width."""
        values = torch.from_numpy(bits.copy()).view(getattr(torch, dtype))
        with torch.no_grad():
            self._named[name].copy_(values.view(self._named[name].shape))

    def names(self) -> list[list[str]]:
        """Return the names of the model's tensors; the names of a tied tensor form one list."""
        return names_of_tensors(self._named)

    def weights_changed(self) -> None:
        """Drop cached results of earlier weights."""
        self._sampler.weights_changed()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Rollout]]:
        """Return the answers to each prompt."""
        return self._sampler.generate(prompts, params)


class RaySampler(Sampler):
    """A sampler in an actor of Ray.

    Args:
        config: Config of transformers.
        dtype: Dtype of the parameters.
        tokenizer: The tokenizer of the model.
        resources: Resources of the actor, by the names of Ray's options, such as `{"num_gpus": 1}`.
        options: Options of the engine.

    Raises:
        ValueError: Ray is not installed, or not running.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        tokenizer: Any,
        *,
        resources: Mapping[str, Any],
        **options: Any,
    ) -> None:
        self._ray = _running_ray()
        made = self._ray.remote(RolloutActor).options(**resources)
        self._actor = made.remote(config, _name_of(dtype), tokenizer, options)
        self.names: list[list[str]] = self._answer(self._actor.names.remote())

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send values by the names of the model's tensors; consumes all tensors, also after an error.

        Raises:
            RuntimeError: The actor has ended.
        """
        in_flight: list[Any] = []
        problem: Exception | None = None
        for name, tensor in tensors:  # consume all: the iteration is collective
            if problem is not None:
                continue
            try:
                host = tensor.detach().cpu().contiguous().reshape(-1)
                bits = host.view(_BITS[host.itemsize]).numpy()
                in_flight.append(self._actor.load.remote(name, bits, _name_of(host.dtype)))
                if len(in_flight) > 1:
                    self._answer(in_flight.pop(0))
            except Exception as error:
                problem = error
        if problem is not None:
            raise problem
        for each in in_flight:
            self._answer(each)

    def weights_changed(self) -> None:
        """See the base class."""
        self._answer(self._actor.weights_changed.remote())

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See the base class."""
        asked = self._actor.generate.remote([list(each) for each in prompts], list(params))
        found: list[list[Rollout]] = self._answer(asked)
        return found

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)

    def _answer(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            raise RuntimeError(f"the engine in Ray's process has ended: {error}") from error
        except self._ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None


class RayWeights(EngineWeights):
    """The values of a model in an actor of Ray.

    Args:
        source: This rank's part of the model in training.
        sampler: The sampler of the actor.
    """

    def __init__(self, source: nn.Module, sampler: RaySampler) -> None:
        self._values, self._sampler = WeightStream(source), sampler
        self.refresh()

    def refresh(self) -> None:
        """See the base class.

        Raises:
            RuntimeError: The actor of some rank has ended.
        """
        problem: str | None = None
        try:
            self._sampler.load(self._values.of(self._sampler.names))
        except RuntimeError as error:
            problem = str(error)
        told = gather_values(problem)  # all ranks exchange their errors, so that they raise together
        failed = [rank for rank, each in enumerate(told) if each is not None]
        if failed:
            raise RuntimeError(f"weights did not reach the engine of rank {failed[0]}: {told[failed[0]]}")


def _running_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            'placement="ray" needs Ray: pip install "colossalai[ray]", or leave placement out'
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                'placement="ray", and Ray is not running: start it with `ray start --head`, or call '
                "ray.init(...) on every rank before"
            ) from error
    return ray


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
