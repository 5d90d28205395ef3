"""Registry of sharding rules, by the full names of classes of modules.

The one thing of this package that changes while a program runs: `register_rule` adds to it.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from colossalai.pipeline import ModelStage, is_elsewhere
from colossalai.shardformer.policies import (
    BERT,
    BLOOM,
    CAUSAL,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    LEFT_OUT,
    LLAMA,
    OPT,
    PHI,
    T5,
    VIT,
    Policy,
    Rule,
)


class RuleRegistry:
    """Rules by the full names of classes; a class has one rule, its subclasses have it as well.

    Args:
        policies: The rules to begin with.

    Raises:
        ValueError: Two policies have different rules for one class.
    """

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        self._rules: dict[str, Rule] = {}
        for policy in policies:
            for name, rule in policy.items():
                self.register(name, rule)

    def register(self, kind: type[nn.Module] | str, rule: Rule, *, replace: bool = False) -> None:
        """Add a rule; see `register_rule`."""
        if not isinstance(rule, Rule):
            raise ValueError(f"the rule is a {type(rule).__name__}; it must be a colossalai.shardformer.Rule")
        name = _full_name(kind)
        if not replace and self._rules.get(name, rule) != rule:
            raise ValueError(
                f"{name} has another rule already, {self._rules[name]}; register_rule(..., replace=True) "
                "puts yours in its place"
            )
        self._rules[name] = rule

    def find(self, module: nn.Module) -> Rule | None:
        """Return the rule of the class of a module, or of the nearest base class that has one."""
        names = map(_full_name, type(module).__mro__)
        return next((self._rules[name] for name in names if name in self._rules), None)

    def names(self) -> list[str]:
        """Return the full names of the classes that have a rule."""
        return sorted(self._rules)


def _full_name(kind: type | str) -> str:
    if isinstance(kind, type):
        return f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(kind, str) or "." not in kind:
        raise ValueError(
            f"{kind!r} is not a class; pass the class itself, or its full name as in "
            "'transformers.models.gpt2.modeling_gpt2.GPT2MLP'"
        )
    return kind


_registry = RuleRegistry((BERT, BLOOM, CAUSAL, GPT2, GPT_NEOX, GPT_OSS, LEFT_OUT, LLAMA, OPT, PHI, T5, VIT))


def register_rule(kind: type[nn.Module] | str, rule: Rule, *, replace: bool = False) -> None:
    """Register the rule of a class of modules for tensor parallelism.

    Args:
        kind: The class, or its full name; subclasses are cut alike.
        rule: The rule.
        replace: Whether to replace another rule of the class.

    Raises:
        ValueError: `kind` is not a class, or it has another rule and `replace` is False.
    """
    _registry.register(kind, rule, replace=replace)


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule of the class of a module, or of the nearest base class that has one."""
    return _registry.find(module)


def sharded_classes() -> list[str]:
    """Return the full names of the classes that have a rule."""
    return _registry.names()


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model by their names; for a stage of a pipeline, the model that it is of."""
    for name, part in model.named_modules():
        if not is_elsewhere(part):
            yield name, part.model if isinstance(part, ModelStage) else part
