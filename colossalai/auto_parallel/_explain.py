"""Plans in words: choices, shares of time and memory, and the costs of alternative cuts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from colossalai.runtime import RecomputeSegment

if TYPE_CHECKING:
    from colossalai.auto_parallel._plan import AutoPlan

_WIDTH = 78


def explain_plan(plan: "AutoPlan") -> str:
    """Return a description of a plan, in lines of less than 80 characters."""
    setting = plan.setting
    budget = "no budget" if plan.memory_budget is None else f"a budget of {_budget(plan)} a rank"
    lines = [
        *_wrapped(
            "",
            f"{plan.model} on {plan.world_size} ranks, batch {plan.batch}, {plan.precision}, "
            f"{plan.optimizer}, {budget}, by the profile {plan.profile!r}",
        ),
        "",
        f"  layout          {setting}",
        *_wrapped("  cuts            ", _counted(plan.cuts.values())),
        *_wrapped("  recomputed      ", _recomputed(plan)),
        *(["  batch norms     over all replicas"] if plan.sync_batch_norm else []),
        "",
        f"A step is predicted to take {_seconds(plan.step_seconds)}:",
        *_shares(plan.seconds, _seconds),
        "",
        f"A rank is predicted to need {_bytes(plan.peak_bytes)} at most:",
        *_shares(plan.bytes, _bytes),
        *([f"Run for a step, it took {_bytes(plan.counted_bytes)}."] if plan.counted_bytes else []),
        "",
        "The operations that take most:",
        *(
            line
            for operation, module, seconds in plan.costliest
            for line in _wrapped(
                f"  {_seconds(seconds):>10}  ", f"{operation} of {module or 'the model itself'}"
            )
        ),
    ]
    if plan.second:
        more = plan.second_seconds / plan.step_seconds - 1
        lines += ["", *_wrapped("", f"The best plan of other sizes takes {more:.0%} longer: {plan.second}")]
    if plan.gap > 0:
        lines.append(f"Other cuts under these sizes could save {plan.gap:.1%} at most.")
    return "\n".join(lines)


def explain_module(plan: "AutoPlan", name: str) -> str:
    """Return the cut of a module, its costs, and the step time under each other cut."""
    found = {
        each: figures
        for each, figures in plan.modules.items()
        if each == name or each.startswith(f"{name}.") or name == ""
    }
    if not found:
        near = get_close_matches(str(name), plan.modules, n=3) or list(plan.modules)[:5]
        hint = f"it names {', '.join(map(repr, near))}" if near else "tp 1 cuts nothing"
        raise ValueError(f"the plan has no module {name!r} that could be cut: {hint}")
    lines = []
    for each, figures in found.items():
        lines.append(
            f"{each}: {figures.cut}; {_seconds(figures.seconds)} of a step, {_bytes(figures.bytes)} of "
            "parameters and states"
        )
        for cut, seconds in figures.others.items():
            more = seconds - plan.step_seconds
            sign = "longer" if more >= 0 else "shorter, and does not fit the budget or the layers beside it"
            lines.append(f"  {cut}: a step would be {_seconds(abs(more))} {sign}")
    return "\n".join(lines)


def explain_difference(plan: "AutoPlan", other: "AutoPlan") -> str:
    """Return the differences of two plans, one line for each."""
    lines = []
    pairs = {
        "model": (plan.model, other.model),
        "parameters": (_num_parameters(plan), _num_parameters(other)),
        "batch": (plan.batch, other.batch),
        "layout": (str(plan.setting), str(other.setting)),
        "precision": (plan.precision, other.precision),
        "optimizer": (plan.optimizer, other.optimizer),
        "profile": (plan.profile, other.profile),
        "budget": (_budget(plan), _budget(other)),
        "batch norms": (_batch_norms(plan), _batch_norms(other)),
        "recomputed": (_recomputed(plan), _recomputed(other)),
        "step": (_seconds(plan.step_seconds), _seconds(other.step_seconds)),
        "memory": (_bytes(plan.peak_bytes), _bytes(other.peak_bytes)),
    }
    lines += [f"{name}: {mine} -> {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    for name in dict.fromkeys((*plan.cuts, *other.cuts)):
        mine, theirs = plan.cuts.get(name, "whole"), other.cuts.get(name, "whole")
        if mine != theirs:
            lines.append(f"{name}: {mine} -> {theirs}")
    return "\n".join(lines) or "no difference"


def _budget(plan: "AutoPlan") -> str:
    return "none" if plan.memory_budget is None else _bytes(plan.memory_budget)


def _batch_norms(plan: "AutoPlan") -> str:
    return "over all replicas" if plan.sync_batch_norm else "over each rank's samples"


def _num_parameters(plan: "AutoPlan") -> str:
    return f"{sum(map(math.prod, plan.parameters.values())):,} in {len(plan.parameters)} tensors"


def _recomputed(plan: "AutoPlan") -> str:
    if not plan.segments:
        return "nothing"
    return ", ".join(_segment(each, plan) for each in plan.segments)


def _segment(segment: RecomputeSegment, plan: "AutoPlan") -> str:
    first, last = plan.blocks[segment.first], plan.blocks[segment.last - 1]
    name = first if first == last else f"{first} to {last}"
    inner = ", ".join(_segment(each, plan) for each in segment.inner)
    return f"{name} (within it {inner})" if inner else name


def _counted(cuts: Iterable[str]) -> str:
    counts = Counter(cuts)
    if not counts:
        return "none"
    return ", ".join(f"{count} {cut}" for cut, count in sorted(counts.items()))


def _shares(parts: Mapping[str, float], say: object) -> list[str]:
    assert callable(say)
    total = sum(parts.values()) or 1.0
    return [f"  {name:30} {say(value):>10} {value / total:>5.0%}" for name, value in parts.items() if value]


def _wrapped(begin: str, text: str) -> list[str]:
    """Return a text behind a label, wrapped to `_WIDTH` columns."""
    lines, current = [], begin
    for word in text.split(" "):
        if len(current) + len(word) > _WIDTH and current.strip():
            lines.append(current.rstrip())
            current = " " * len(begin)
        current += f"{word} "
    return [*lines, current.rstrip()]


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"
