"""What is asked of a benchmark and what it finds, as values that go through JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from colossalai.cli._benchmark._configurations import Configuration


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """What to run.

    Attributes:
        num_procs: Number of processes.
        batch_size: Sequences in the whole batch.
        seq_length: Tokens in a sequence.
        hidden_size: Features of a token.
        num_heads: Heads of an attention.
        num_layers: How often the layer of a model is repeated.
        warmup: Steps before those that count.
        rounds: Steps that count.
        configurations: The ways to cut the layers.
    """

    num_procs: int
    batch_size: int
    seq_length: int
    hidden_size: int
    num_heads: int
    num_layers: int
    warmup: int
    rounds: int
    configurations: tuple[Configuration, ...]

    def describe(self) -> str:
        """Say the sizes in a line."""
        return (
            f"batch {self.batch_size}, sequence {self.seq_length}, hidden {self.hidden_size}, "
            f"{self.num_heads} heads, {self.num_layers} layers; medians of {self.rounds} steps"
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one model in one configuration; times are medians, of the slowest rank.

    Attributes:
        model: The model.
        configuration: How it was cut.
        forward_ms: Time of the forward.
        backward_ms: Time of the backward.
        forward_communication_ms: Time inside collectives in the forward, waiting included: their share of a
            forward in which nothing overlaps with them, of `forward_ms`.
        backward_communication_ms: The same in the backward.
        bytes_sent: Bytes that a rank sends in a step.
        num_parameters: Parameters that a rank holds.
        parameter_bytes: Their bytes.
        saved_bytes: Bytes of activations that the forward keeps for the backward.
        device_peak_bytes: Peak of a step on the accelerator, None without one.
    """

    model: str
    configuration: Configuration
    forward_ms: float
    backward_ms: float
    forward_communication_ms: float
    backward_communication_ms: float
    bytes_sent: int
    num_parameters: int
    parameter_bytes: int
    saved_bytes: int
    device_peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A configuration that does not fit a model.

    Attributes:
        model: The model; None if it fits none.
        label: The configuration.
        reason: Why, in plain words.
    """

    model: str | None
    label: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that a benchmark finds."""

    settings: BenchmarkSettings
    machine: dict[str, Any]
    rows: list[Figures] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """Return what `to_json` has written."""
        content = json.loads(text)
        return cls(
            settings=settings_from(content["settings"]),
            machine=content["machine"],
            rows=[
                Figures(**{**row, "configuration": Configuration(**row["configuration"])})
                for row in content["rows"]
            ],
            skipped=[Skipped(**row) for row in content["skipped"]],
        )


def settings_from(content: dict[str, Any]) -> BenchmarkSettings:
    """Return settings from their fields as JSON has them."""
    configurations = tuple(Configuration(**fields) for fields in content["configurations"])
    return BenchmarkSettings(**{**content, "configurations": configurations})
