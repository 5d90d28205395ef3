"""Validation of the text of a plan: parts and their types, known words, consistency of the parts.

A plan can be edited by hand. Errors are raised when the text is read, with the name of the part, since later
code does not check again.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from colossalai.auto_parallel._costs import OPTIMIZER_STATES, PRECISIONS
from colossalai.auto_parallel.cuts._strategies import CUT_OF_FIELD, CUTS
from colossalai.shardformer import Rule

if TYPE_CHECKING:
    from colossalai.auto_parallel._plan import AutoPlan


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_figures(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_finite, value.values()))


def _are_modules(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    for each in value.values():
        match each:
            case [str(), seconds, size, others] if _is_finite(seconds) and _is_finite(size):
                if not _are_figures(others):
                    return False
            case _:
                return False
    return True


def _is_size(value: Any) -> bool:
    return value is None or (_is_finite(value) and value > 0)


_TEXT = (lambda value: isinstance(value, str), "a text")
_FIGURES = (_are_figures, "a finite number for each name")
_SIZE = (_is_size, "bytes above 0, or null")
_PARTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("model", "digest", "precision", "optimizer", "profile", "second"), _TEXT),
    **dict.fromkeys(("seconds", "bytes"), _FIGURES),
    **dict.fromkeys(("memory_budget", "counted_bytes"), _SIZE),
    "parameters": (
        lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
        'a shape such as "4x8" for each name',
    ),
    "batch": (lambda value: type(value) is int and value > 0, "a number of samples above 0"),
    "setting": (lambda value: isinstance(value, dict), "the sizes by name"),
    "rules": (
        lambda value: isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()),
        "a rule for each name",
    ),
    "modules": (_are_modules, "[cut, seconds, bytes, {cut: seconds}] for each name"),
    "segments": (lambda value: isinstance(value, list), "a list of [first, last, [inner segments]]"),
    "blocks": (_are_names, "a list of names"),
    "sync_batch_norm": (lambda value: isinstance(value, bool), "true or false"),
    "costliest": (lambda value: isinstance(value, list), "a list of [operation, module, seconds]"),
    **dict.fromkeys(
        ("second_seconds", "gap"), (lambda value: _is_finite(value) and value >= 0, "a number of 0 or more")
    ),
}
"""Check and description of the values of each part."""


def check_parts(content: Mapping[str, Any], file: str) -> None:
    """Refuse a text with missing or unknown parts, or with values of another type than theirs.

    Raises:
        ValueError: `content` is such a text; the message names the first such part.
    """
    for key in content:
        if key not in _PARTS and key not in ("format", "version"):
            near = get_close_matches(key, _PARTS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": it has {', '.join(_PARTS)}"
            raise ValueError(f"{file}: a plan has no {key!r}{hint}")
    for key, (is_right, what) in _PARTS.items():
        if key not in content:
            raise ValueError(f"{file} is a plan that lacks {key!r}")
        if not is_right(content[key]):
            raise ValueError(f"{file}: {key} is {content[key]!r:.80}; it must be {what}")


def refuse_contradictions(plan: "AutoPlan", file: str) -> None:
    """Refuse a plan with contradictory parts, as after an edit by hand.

    Raises:
        ValueError: `plan` is such a plan; the message has both parts.
    """
    setting = plan.setting
    if plan.batch % (setting.data * setting.microbatches):
        raise ValueError(
            f"{file}: a batch of {plan.batch} cannot be shared by {setting.data} data-parallel ranks in "
            f"{setting.microbatches} microbatches each"
        )
    if setting.data % setting.expert:
        raise ValueError(
            f"{file}: expert of the setting is {setting.expert}, which does not divide the {setting.data} "
            "data-parallel ranks"
        )
    if setting.microbatches > 1 and setting.pipeline == 1:
        raise ValueError(
            f"{file}: {setting.microbatches} microbatches need a pipeline, and there is one stage"
        )
    if any(each.last > len(plan.blocks) for each in plan.segments):
        raise ValueError(f"{file}: segments are of more blocks than the {len(plan.blocks)} of the plan")
    if plan.rules and setting.tensor == 1:
        raise ValueError(
            f"{file}: rules cut {next(iter(plan.rules))!r}, and tensor of the setting is 1, so that there "
            "are no ranks to share it"
        )
    by_rules = {
        f"{name}.{layer}".strip("."): cut
        for name, rule in plan.rules.items()
        for field, cut in CUT_OF_FIELD.items()
        for layer in getattr(rule, field)
    }
    # Layers that share a parameter have the figures of the layer that a rule names.
    named = [figures for layer, figures in plan.modules.items() if layer in by_rules]
    for layer, figures in plan.modules.items():
        cut = by_rules.get(layer, "whole")
        if figures.cut not in (cut, "expert") and not (layer not in by_rules and figures in named):
            raise ValueError(
                f"{file}: {layer!r} is cut {figures.cut!r} among the modules, and {cut!r} by the rules, "
                "which are carried out: change a plan by AutoPlan.with_choice, or both by hand"
            )


def refuse_unknown(plan: "AutoPlan", file: str) -> None:
    """Refuse unknown precisions, optimizers, cuts, sizes and modules, which an edit by hand can introduce.

    Raises:
        ValueError: `plan` has an unknown word; the message lists the known ones.
    """
    for what, value, known in (
        ("precision", plan.precision, tuple(PRECISIONS)),
        ("optimizer", plan.optimizer, tuple(OPTIMIZER_STATES)),
        *((f"cut of {name}", each.cut, CUTS) for name, each in plan.modules.items()),
    ):
        if value not in known:
            raise ValueError(f"{file}: the {what} is {value!r}; there are {', '.join(known)}")
    sizes = {each.name: getattr(plan.setting, each.name) for each in fields(plan.setting)}
    lowest = {name: 0 if name == "zero" else 1 for name in sizes}
    for name, value in sizes.items():
        if type(value) is not int or value < lowest[name] or (name == "zero" and value > 3):
            raise ValueError(
                f"{file}: {name} of the setting is {value!r}; give a number from {lowest[name]} on"
            )
    # A batch norm without parameters has seconds but no bytes.
    norms = [f"{name}.running_mean" for name, each in plan.modules.items() if each.seconds and not each.bytes]
    modules = {"", *_prefixes((*plan.parameters, *norms))}
    for name in (*plan.rules, *plan.modules, *plan.blocks):
        if name not in modules:
            raise ValueError(
                f"{file} names {name!r}, and {plan.model} has no such module with parameters: names "
                f"are such as {', '.join(map(repr, sorted(modules)[1:4]))}"
            )


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return the names of the modules with parameters, directly or in a submodule."""
    found = set()
    for name in names:
        while name := name.rpartition(".")[0]:
            found.add(name)
    return found


def rule_as_dict(rule: Rule) -> dict[str, Any]:
    """Return the fields of a rule that differ from their defaults."""
    found = {}
    for each in fields(rule):
        value = getattr(rule, each.name)
        default = each.default if each.default is not MISSING else None
        if value != default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found


def rule_of_dict(content: Mapping[str, Any]) -> Rule:
    known = {each.name for each in fields(Rule)}
    for key in content:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            raise ValueError(f"a rule has no {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for each in fields(Rule):
        if each.default == () and not _are_names(content.get(each.name, [])):
            raise ValueError(
                f"{each.name} of a rule is {content[each.name]!r:.80}; it must be a list of names"
            )
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Rule(**values)
