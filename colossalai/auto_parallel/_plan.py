"""The plan of Colossal-Auto: a frozen, readable and comparable value that the runtime carries out."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from colossalai._lazy import find_name
from colossalai.amp import FullPrecision, Precision, precision_of
from colossalai.auto_parallel._plan_text import (
    check_parts,
    refuse_contradictions,
    refuse_unknown,
    rule_as_dict,
    rule_of_dict,
)
from colossalai.auto_parallel._setting import Setting
from colossalai.auto_parallel.machine._machine import MachineProfile
from colossalai.auto_parallel.prediction._prediction import SCHEDULE
from colossalai.context import ConfigException, Layout
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, RecomputeSegment, Segments, data_method
from colossalai.shardformer import Rule

_FORMAT = "colossalai plan"
_VERSION = 1
_PRECISION_MODES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bf16": ("bf16", {}),
    "bf16_master": ("bf16", {"master_weights": True}),
    "fp16": ("torch", {}),
    "fp16_naive": ("naive", {}),
}


@dataclass(frozen=True)
class ModuleFigures:
    """Predicted costs of a layer on a rank.

    Attributes:
        cut: One of `CUTS`.
        seconds: Seconds of a step.
        bytes: Bytes of its parameters, with gradients and states.
        others: Seconds of the whole step under each other cut of this layer, with all else unchanged.
    """

    cut: str
    seconds: float
    bytes: float
    others: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """The training plan of a model on a number of ranks.

    Attributes:
        model: The name of the model's class.
        digest: Digest of the trace that it was made for.
        parameters: Names and shapes of the model's parameters: another model is refused by them.
        batch: Samples in the whole batch.
        setting: The sizes of the mesh, stage of ZeRO and microbatches.
        precision: Name of the precision.
        optimizer: Name of the optimizer.
        memory_budget: Bytes of a rank that it was made for. None: no limit.
        profile: Name of the machine's profile.
        rules: Rules of the modules that are cut, by their full names.
        modules: Cut and figures of each layer that could be cut.
        segments: Segments of blocks that are recomputed.
        blocks: Full names of the blocks that the indices of segments refer to.
        sync_batch_norm: Whether batch norms take their statistics over all replicas.
        seconds: Seconds of a step, by purpose.
        bytes: Bytes of the rank that needs most, by purpose.
        costliest: The operations with the most seconds, with their modules and seconds.
        second: Sizes of the best plan of another layout; "" if there is none.
        second_seconds: Seconds of a step of that plan.
        gap: Largest possible improvement by other cuts, as a fraction of the seconds.
        counted_bytes: Counted peak of the rank that needs most. None: the plan was not run.
    """

    model: str
    digest: str
    parameters: Mapping[str, tuple[int, ...]]
    batch: int
    setting: Setting
    precision: str
    optimizer: str
    memory_budget: float | None
    profile: str
    rules: Mapping[str, Rule]
    modules: Mapping[str, ModuleFigures]
    segments: tuple[RecomputeSegment, ...]
    blocks: tuple[str, ...]
    sync_batch_norm: bool
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    costliest: tuple[tuple[str, str, float], ...]
    second: str
    second_seconds: float
    gap: float
    counted_bytes: float | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks of the plan."""
        return self.setting.world_size

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        """Predicted peak of the rank that needs most."""
        return sum(self.bytes.values())

    @property
    def cuts(self) -> Mapping[str, str]:
        """Cut of each layer that could be cut."""
        return {name: each.cut for name, each in self.modules.items()}

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the predicted seconds of a step and bytes of a rank, by purpose; the parts add up."""
        return {
            "seconds": {**self.seconds, "step": self.step_seconds},
            "bytes": {**self.bytes, "peak": self.peak_bytes},
        }

    def layout_over(self, world_size: int) -> Layout:
        """Return the layout of the ranks of a job.

        Args:
            world_size: Number of ranks.

        Raises:
            ConfigException: `world_size` is not the number of ranks of the plan.
        """
        if world_size != self.world_size:
            raise ConfigException(
                f"the plan is for {self.world_size} ranks ({self.setting}), and the job has {world_size}: "
                f"start {self.world_size} processes, or make a plan for {world_size} by "
                f"make_plan(..., world_size={world_size}) or colossalai plan --world-size {world_size}"
            )
        setting = self.setting
        return Layout(
            data=setting.data,
            pipeline=setting.pipeline,
            tensor=setting.tensor,
            mode="1d" if setting.tensor > 1 else None,
            expert=setting.expert,
            plain_layers=setting.tensor > 1,
        )

    def runtime_plan(self) -> Plan:
        """Return the plan that `colossalai.runtime` carries out."""
        setting = self.setting
        is_cut = setting.tensor > 1
        return Plan(
            layout=self.layout_over(self.world_size),
            data=data_method(setting.zero, in_pipeline=setting.pipeline > 1),
            precision=self.make_precision(),
            recompute=self._recompute(),
            pipeline=PipelineOptions(
                num_microbatches=setting.microbatches, schedule=SCHEDULE, partition="balanced"
            )
            if setting.pipeline > 1
            else None,
            cuts=dict(self.rules) if is_cut else None,
            sync_batch_norm=self.sync_batch_norm,
            made_for=self.parameters,
        )

    def _recompute(self) -> bool | Segments | tuple[str, ...]:
        if not self.segments:
            return False
        if all(not each.inner and each.last == each.first + 1 for each in self.segments):
            return tuple(self.blocks[each.first] for each in self.segments)
        return Segments(segments=self.segments, names=self.blocks)

    def make_precision(self) -> Precision:
        """Return the precision of the runtime."""
        if self.precision == "fp32":
            return FullPrecision()
        mode, options = _PRECISION_MODES[self.precision]
        return precision_of(mode, options)

    def explain(self, name: str | None = None) -> str:
        """Return a description of the plan and of its predicted costs.

        Args:
            name: A module, to describe its cut and the alternatives. None: the whole plan.

        Raises:
            ValueError: `name` is not a module that could be cut, and has no such modules in it.
        """
        from colossalai.auto_parallel._explain import explain_module, explain_plan

        return explain_plan(self) if name is None else explain_module(self, name)

    def with_choice(
        self,
        name: str,
        cut: str,
        *,
        model: nn.Module | None = None,
        meta_args: Mapping[str, Any] | None = None,
        profile: MachineProfile | str | Path | None = None,
    ) -> "AutoPlan":
        """Return a plan with another cut of one layer, with its figures.

        Layers that are cut together change together. Neighbors change where they must, to the fastest
        options they can have. Everything else stays, including the sizes and the recomputed segments.

        Args:
            name: Full name of the layer, or of the module whose layers are cut together.
            cut: "whole", "output", "input", "vocab", "channel" or "expert".
            model: The model of the plan, which does not store it; required. It can be on the meta device.
            meta_args: The arguments of its forward, as for `make_plan`; required.
            profile: The machine of the plan. Default: the shipped profile of its name.

        Raises:
            ValueError: `name` is not a layer that could be cut, `cut` is unknown, or is not possible for this
                layer or for those around it; `model`, `meta_args` or `profile` is missing, or is not
                the one of the plan; or a rank would need more than the budget of the plan.
        """
        # `_change` makes a plan, and so imports this module.
        change = find_name(__package__, {"change_cut": f"{__package__}._change"}, "change_cut")
        changed: AutoPlan = change(self, name, cut, model=model, meta_args=meta_args, profile=profile)
        return changed

    def diff(self, other: "AutoPlan") -> str:
        """Return a description of the differences to another plan.

        Raises:
            ValueError: `other` is not a plan.
        """
        if not isinstance(other, AutoPlan):
            raise ValueError(f"other is a {type(other).__name__}: give a plan; load_plan reads one of a file")
        from colossalai.auto_parallel._explain import explain_difference

        return explain_difference(self, other)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            ValueError: `path` cannot be written.
        """
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"the plan cannot be written to {str(path)!r}: {reason}") from error

    def to_json(self) -> str:
        """Return the text that `save` writes."""
        content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "setting":
                value = {one.name: getattr(value, one.name) for one in fields(value)}
            elif each.name == "parameters":
                value = {name: "x".join(map(str, shape)) for name, shape in value.items()}
            elif each.name == "rules":
                value = {name: rule_as_dict(rule) for name, rule in value.items()}
            elif each.name == "modules":
                value = {
                    name: [one.cut, one.seconds, one.bytes, dict(one.others)] for name, one in value.items()
                }
            elif each.name == "segments":
                value = [one.as_lists() for one in value]
            elif isinstance(value, Mapping):
                value = dict(value)
            content[each.name] = value
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, *, name: str = "the text") -> "AutoPlan":
        """Return the plan of a text written by `to_json`.

        Raises:
            ValueError: `text` is not the JSON of a plan, has an unknown version, or contains an unknown or
                contradictory precision, optimizer, cut, module or size.
        """
        try:
            content = json.loads(text)
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{name} is not a plan; AutoPlan.save and `colossalai plan` write plans")
        if content.get("version") != _VERSION:
            raise ValueError(
                f"{name} is a plan of version {content.get('version')!r}, and this is version {_VERSION}: "
                "make it again"
            )
        check_parts(content, name)
        try:
            known = {each.name: content[each.name] for each in fields(AutoPlan)}
            known["setting"] = Setting(**known["setting"])
            known["parameters"] = {
                key: tuple(map(int, value.split("x") if value else ()))
                for key, value in known["parameters"].items()
            }
            known["rules"] = {key: rule_of_dict(value) for key, value in known["rules"].items()}
            known["modules"] = {key: ModuleFigures(*value) for key, value in known["modules"].items()}
            known["segments"] = tuple(map(RecomputeSegment.from_lists, known["segments"]))
            known["blocks"] = tuple(known["blocks"])
            known["costliest"] = tuple(
                (str(operation), str(module), float(seconds))
                for operation, module, seconds in known["costliest"]
            )
            plan = AutoPlan(**known)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is a plan that lacks or garbles a part: {error!r}") from error
        refuse_unknown(plan, name)
        refuse_contradictions(plan, name)
        return plan


def load_plan(path: str | Path) -> AutoPlan:
    """Return the plan of a file written by `AutoPlan.save` or `colossalai plan`.

    Raises:
        ValueError: `path` cannot be read, or does not contain a plan.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"the plan is a {type(path).__name__}: load_plan takes the path of its file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the plan {str(path)!r} cannot be read: {error}") from error
    return AutoPlan.from_json(text, name=str(path))


def given_plan(plan: AutoPlan | str | Path) -> AutoPlan:
    """Return a plan that is given as it is, or as the path of its file.

    Raises:
        ValueError: `plan` is neither a plan nor a path, or its file cannot be read or lacks a plan.
    """
    if isinstance(plan, str | Path):
        return load_plan(plan)
    if not isinstance(plan, AutoPlan):
        raise ValueError(
            f"the plan is a {type(plan).__name__}: give the result of make_plan or load_plan, or the path of "
            "a file that AutoPlan.save or `colossalai plan` wrote"
        )
    return plan
