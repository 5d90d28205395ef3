"""Config of an adapter: the entries of peft's `adapter_config.json` that affect the outputs of a model.

The formula is that of `products/_delta.py`, with

    scale = alpha / rank            or alpha / sqrt(rank) with `use_rslora` (2312.03732)

with the rank and alpha of the first pattern that matches the end of a layer's name, else the common ones.
Unsupported entries are refused by name: without them an adapter would silently give other answers.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"

_HANDLED = frozenset(
    {
        "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "task_type",
        "use_rslora",
    }
)  # fmt: skip
# Entries for training, for the initial values, or about the file's origin.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config",
    }
)  # fmt: skip
_OFF: tuple[Any, ...] = (None, False, 0, "", "none", [], {})
# Other initializations change the model's own weights, and the adapter is relative to these.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Config of an adapter.

    Attributes:
        rank: Rank of its layers without a matching pattern.
        alpha: Numerator of the scale of its layers without a matching pattern.
        is_rank_stabilized: Whether the denominator of the scale is the root of the rank.
        rank_pattern: Ranks by patterns of names.
        alpha_pattern: Alphas by patterns of names.
        targets: The adapted layers: ends of their names, or one pattern for whole names; None for all linear
            layers but the head.
        excluded: Exceptions from these, in the same two forms.
        blocks: Indices of the blocks with adapted layers; None for all.
        block_patterns: Parts of the name before the index of a block; empty for any name.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    targets: str | Sequence[str] | None = None
    excluded: str | Sequence[str] = ()
    blocks: Sequence[int] | None = None
    block_patterns: Sequence[str] = ()

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read the config in a folder of peft.

        Raises:
            ValueError: `folder` has no readable config, or one with unsupported entries (the message lists
                all).
        """
        path = folder / CONFIG_FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}: an adapter is a folder as peft saves it") from error
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path} is not a JSON object")
        problems = list(_problems(fields))
        if problems:
            raise ValueError(f"{path} has unsupported entries: {'; '.join(problems)}")
        return cls._of(fields)

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> "AdapterConfig":
        targets = fields["target_modules"]
        blocks = fields.get("layers_to_transform")
        return cls(
            rank=fields["r"],
            alpha=fields["lora_alpha"],
            is_rank_stabilized=bool(fields.get("use_rslora")),
            rank_pattern=fields.get("rank_pattern") or {},
            alpha_pattern=fields.get("alpha_pattern") or {},
            targets=None if targets == _ALL_LINEAR else targets,
            excluded=fields.get("exclude_modules") or (),
            blocks=[blocks] if isinstance(blocks, int) else blocks or None,
            block_patterns=_as_list(fields.get("layers_pattern")),
        )

    def rank_of(self, layer: str) -> int:
        """Return the rank of a layer, by its name in the model."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, layer), self.rank)

    def scale_of(self, layer: str) -> float:
        """Return the factor of a layer's delta, by the layer's name in the model."""
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, layer), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def adapts(self, layer: str) -> bool | None:
        """Return whether the config names a layer; None if the tensors in the file decide."""
        if self.targets is None:
            return None
        if self.excluded and _names(self.excluded, layer):
            return False
        if not _names(self.targets, layer):
            return False
        # A pattern or a full name already determines the blocks.
        if isinstance(self.targets, str) or layer in self.targets or self.blocks is None:
            return True
        number = _block_of(layer, self.block_patterns)
        return number is not None and number in self.blocks


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    if fields.get("peft_type") != "LORA":
        yield f"peft_type={fields.get('peft_type')!r} (only 'LORA' is)"
        return
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type={fields['task_type']!r} (only 'CAUSAL_LM' is)"
    if fields.get("bias", "none") != "none":
        yield f"bias={fields['bias']!r} (only 'none' is)"
    beginning = fields.get("init_lora_weights", True)
    if beginning not in _BEGINNINGS:
        yield (
            f"init_lora_weights={beginning!r}, which changes the model's own weights (peft's save_pretrained "
            "makes a plain adapter of it with path_initial_model_for_weight_conversion)"
        )
    for name, value in fields.items():
        if name not in _HANDLED | _WITHOUT_EFFECT and value not in _OFF:
            yield f"{name}={value!r}"
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        value = fields.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            yield f"{name}={value!r} (it is a number above 0)"
    targets = fields.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        yield f"target_modules={targets!r} (it is a list of names, or a pattern)"


def _names(named: str | Sequence[str], layer: str) -> bool:
    if isinstance(named, str):
        return re.fullmatch(named, layer) is not None
    return any(layer == each or layer.endswith(f".{each}") for each in named)


def _first_match(patterns: Mapping[str, Any], layer: str) -> str:
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", layer)), layer)


def _block_of(layer: str, patterns: Sequence[str]) -> int | None:
    """Return the index of a layer's block: the first number in its name."""
    before = [rf"(?:^|.*?\.){each}" for each in patterns] or [r".*?\.[^.]*"]
    found = (re.match(rf"{each}\.(\d+)\.", layer) for each in before)
    return next((int(match.group(1)) for match in found if match), None)


def _as_list(value: str | Sequence[str] | None) -> Sequence[str]:
    return [value] if isinstance(value, str) and value else value or ()
