"""Settings and results of a benchmark, as dataclasses that convert to JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from colossalai.cli._benchmark._configurations import Configuration


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings:
    """Settings of a benchmark.

    Attributes:
        num_procs: Number of processes.
        batch_size: Number of sequences in the global batch.
        seq_length: Number of tokens in a sequence.
        hidden_size: Number of features of a token.
        num_heads: Number of attention heads.
        num_layers: Number of layers of a model.
        warmup: Number of steps before the measured ones.
        rounds: Number of measured steps.
        configurations: The configurations to run.
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
        """Return a line with the sizes."""
        return (
            f"batch {self.batch_size}, sequence {self.seq_length}, hidden {self.hidden_size}, "
            f"{self.num_heads} heads, {self.num_layers} layers; medians of {self.rounds} steps"
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one model in one configuration; times are medians of the slowest rank.

    Attributes:
        model: Name of the model.
        configuration: Its configuration.
        forward_ms: Time of the forward.
        backward_ms: Time of the backward.
        forward_communication_ms: Time inside collectives in the forward, waiting included: their share of a
            forward in which nothing overlaps with them, of `forward_ms`.
        backward_communication_ms: The same in the backward.
        bytes_sent: Bytes that a rank sends in a step.
        num_parameters: Number of parameters on a rank.
        parameter_bytes: Bytes of the parameters on a rank.
        saved_bytes: Bytes of activations that the forward saves for the backward.
        device_peak_bytes: Peak memory of a step on the accelerator; None without one.
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
        model: Name of the model; None if the configuration fits no model.
        label: Name of the configuration.
        reason: Reason of the mismatch.
    """

    model: str | None
    label: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a benchmark."""

    settings: BenchmarkSettings
    machine: dict[str, Any]
    rows: list[Figures] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the results as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Results":
        """Return the results of a text from `to_json`."""
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
    """Return settings from their JSON fields."""
    configurations = tuple(Configuration(**fields) for fields in content["configurations"])
    return BenchmarkSettings(**{**content, "configurations": configurations})
