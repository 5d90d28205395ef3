"""One training run in many layouts: how it is built, what it holds, and how it is saved and loaded.

The run is a small GPT with tied weights and a vocabulary that no number of ranks divides, in float64, under
Adam with two groups. A layout is a config and a number of ranks. The batch is the same in all of them, so the
losses are.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import colossalai
from colossalai.checkpoint_io import TrainingState, load_training_state, save_training_state
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import HybridAdam, Lamb
from colossalai.tensor import spec_of
from tests.model_zoo.tiny import build, criterion_of, make_batch
from tests.parity.table import MODES
from tests.parity.training import whole
from tests.shardformer.models import InDouble, language_loss, mixtral_of_eight

VOCAB, SEQ, BATCH = 13, 8, 16
IS_FULL = os.environ.get("FULL_MATRIX") == "1"
BEFORE, AFTER = 2, 3 if IS_FULL else 2  # steps before a save, and after it
REFERENCE = "whole tensors"

Named = dict[str, dict[str, Tensor]]
"""By parameter name, and then "parameter" or the key of a state."""


@dataclass(frozen=True)
class Layout:
    """How the run is laid out.

    Attributes:
        num_ranks: Number of ranks.
        config: What it is launched with.
        optimizer: The optimizer; "disk" is "hybrid" with its states in files.
        dtype: Of the model as it is built.
        model: "gpt", or "mixtral", which has experts.
    """

    num_ranks: int
    config: dict[str, Any]
    optimizer: str = "adam"
    dtype: torch.dtype = torch.float64
    model: str = "gpt"


def pipeline(**options: Any) -> dict[str, Any]:
    return {"size": 2, "partition": "uniform", **options}


def gemini(chunk_size: int = 2000) -> dict[str, Any]:
    """Return a config with chunks of a number of elements."""
    sizes = {"search_range_mb": 0, "hidden_dim": 1, "min_chunk_size_mb": chunk_size / 2**20}
    return {"gemini": {"precision": "fp32", **sizes}}


def experts(num_ranks: int, ep_size: int, parallel: dict[str, Any] | None = None, **config: Any) -> Layout:
    """Return a layout of a model with experts, which some ranks share."""
    return Layout(
        num_ranks, {"parallel": {"moe": {"size": ep_size}, **(parallel or {})}, **config}, model="mixtral"
    )


ONLY_IF_FULL = {
    "gemini1": Layout(1, gemini()),
    "gemini4": Layout(4, gemini(900)),
    "gemini2-pp2": Layout(4, {**gemini(700), "parallel": {"pipeline": pipeline()}, "NUM_MICRO_BATCHES": 2}),
}
LAYOUTS = {
    "one": Layout(1, {}),
    "dp2": Layout(2, {}),
    "tp2": Layout(2, {"parallel": {"tensor": MODES["1d"]}}),
    "2d": Layout(4, {"parallel": {"tensor": MODES["2d"]}}),
    "2.5d": Layout(8, {"parallel": {"tensor": MODES["2.5d"]}}),
    "3d": Layout(8, {"parallel": {"tensor": MODES["3d"]}}),
    "pp2": Layout(2, {"parallel": {"pipeline": pipeline()}, "NUM_MICRO_BATCHES": 2}),
    "pp2-tp2": Layout(
        4, {"parallel": {"pipeline": pipeline(), "tensor": MODES["1d"]}, "NUM_MICRO_BATCHES": 2}
    ),
    "zero1": Layout(4, {"zero": {"stage": 1}}),
    "zero2-tp2": Layout(4, {"zero": {"stage": 2}, "parallel": {"tensor": MODES["1d"]}}),
    "fsdp": Layout(2, {"zero": {"stage": 3}}),
    "gemini2": Layout(2, gemini()),
    "gemini2-tp2": Layout(4, {**gemini(700), "parallel": {"tensor": MODES["1d"]}}),
    **(ONLY_IF_FULL if IS_FULL else {}),
}
FURTHER = {
    **ONLY_IF_FULL,
    "interleaved": Layout(
        2,
        {
            "parallel": {"pipeline": pipeline(schedule="interleaved")},
            "NUM_MICRO_BATCHES": 2,
            "NUM_CHUNKS": 2,
        },
    ),
    "sequence": Layout(2, {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}),
    "zero1-pp2": Layout(
        4, {"zero": {"stage": 1}, "parallel": {"pipeline": pipeline()}, "NUM_MICRO_BATCHES": 2}
    ),
    "dp2-tp2": Layout(4, {"parallel": {"tensor": MODES["1d"]}}),
    "fsdp-tp2": Layout(4, {"zero": {"stage": 3}, "parallel": {"tensor": MODES["1d"]}}),
    "fsdp-2d": Layout(8, {"zero": {"stage": 3}, "parallel": {"tensor": MODES["2d"]}}),
    "lamb": Layout(1, {}, "lamb"),
    "lamb-zero2": Layout(2, {"zero": {"stage": 2}}, "lamb"),
    "hybrid": Layout(2, {}, "hybrid", torch.float32),
    "disk": Layout(1, {}, "disk", torch.float32),
    "ep1": Layout(1, {}, model="mixtral"),
    "ep2": experts(2, 2),
    "ep4-zero1": experts(4, 4, zero={"stage": 1}),
    "ep2-zero2": experts(4, 2, zero={"stage": 2}),
    "ep2-tp2": experts(4, 2, {"tensor": MODES["1d"]}),
    "ep2-fsdp": experts(4, 2, zero={"stage": 3}),
    "ep2-pp2": experts(4, 2, {"pipeline": pipeline()}, NUM_MICRO_BATCHES=2),
    "ep2-gemini": experts(4, 2, **gemini(900)),
}


def layout_of(name: str) -> Layout:
    return (LAYOUTS | FURTHER)[name]


class Run:
    """The run in this job's layout.

    Args:
        layout: The layout.
        seed: The seed of the weights.
        num_layers: Number of blocks.
    """

    def __init__(self, layout: Layout, seed: int, num_layers: int) -> None:
        torch.set_default_dtype(layout.dtype)
        colossalai.launch_from_torch(layout.config, verbose=False)
        torch.manual_seed(seed)
        model, criterion = build_model(layout.model, num_layers)
        optimizer = build_optimizer(layout.optimizer, model)
        numbered = {id(param): name for name, param in model.named_parameters()}
        self._names = [numbered[id(param)] for group in optimizer.param_groups for param in group["params"]]
        self.engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

    @property
    def state(self) -> TrainingState:
        """Return what is saved of it."""
        return TrainingState(model=self.engine.model.unwrap(), optimizer=self.engine.optimizer)

    def train(self, steps: range) -> list[float | None]:
        """Return this rank's losses; None where it does not know them."""
        with InDouble():  # the norms of models of transformers, whose sums would depend on the layout
            return [self._step(step) for step in steps]

    def evaluate(self) -> None:
        """Run the model forward."""
        self._run(0, forward_only=True)

    def _step(self, step: int) -> float | None:
        self.engine.zero_grad()
        loss = self._run(step)
        self.engine.step()
        return None if loss is None else float(loss)

    def _run(self, step: int, *, forward_only: bool = False) -> Tensor | None:
        ids = make_batch("gpt", BATCH, step, VOCAB)[0].repeat(1, 2)[:, :SEQ]
        part = ids.chunk(gpc.data_parallel_size)[gpc.mesh.axis_rank("dp")]
        batch = iter([(part, part)])
        return self.engine.execute_schedule(batch, forward_only, return_output_label=False)[2]

    def tensors(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
        """Yield each parameter that this rank has by its name in the whole model, with all tensors of it."""
        optimizer, model = self.engine.optimizer, self.engine.model
        values = model.data.state_dict(model.unwrap())  # as this rank holds them
        named = list(model.named_parameters())
        params = {optimizer.param_names[param]: param for _, param in named}
        values = {optimizer.param_names[param]: values[name] for name, param in named}
        names = [name for name in self._names if name in params]
        states = optimizer.state_dict()["state"]
        for number, name in enumerate(names):
            found = {"parameter": values[name]}
            found |= {key: value for key, value in states.get(number, {}).items() if torch.is_tensor(value)}
            yield name, params[name], found

    def wholes(self) -> Named:
        """Return what this rank has, whole; collective."""
        return {
            name: {
                key: whole(param, value) if value.ndim == param.ndim else value.clone()
                for key, value in found.items()
            }
            for name, param, found in self.tensors()
        }

    def differences(self, expected: Named) -> list[str]:
        """Return the names of what this rank has and is not bit for bit as it should be."""
        return [
            f"{name} {key}"
            for name, param, found in self.tensors()
            for key in found.keys() | expected[name].keys()
            if key not in found or not is_part(found[key], expected[name].get(key), param)
        ]


def is_part(own: Tensor, expected: Tensor | None, param: nn.Parameter) -> bool:
    """Return whether a tensor is this rank's part of another; told by the spec, or by how FSDP cuts."""
    if expected is None:
        return False
    spec = spec_of(param)
    if spec is not None and own.ndim == param.ndim and expected.ndim:
        expected = spec.slice_of(expected)
    if isinstance(own, DTensor):
        mesh = own.device_mesh
        if expected.ndim:
            rows = math.ceil(expected.size(0) / mesh.size())
            expected = expected[rows * mesh.get_local_rank() :][:rows]
        own = own.to_local()
    return own.dtype == expected.dtype and torch.equal(own.cpu(), expected)


def build_model(name: str, num_layers: int) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Return a model and its criterion."""
    if name == "mixtral":
        sizes = {"vocab_size": VOCAB, "hidden_size": 16, "head_dim": 4, "intermediate_size": 12}
        options = {"num_attention_heads": 4, "num_hidden_layers": num_layers}
        return mixtral_of_eight(**sizes, **options), language_loss
    options = {"vocab_size": VOCAB, "vocab_parallel_limit": 1, "max_position_embeddings": SEQ}
    return build("gpt", num_layers=num_layers, **options), criterion_of("gpt")


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    make: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.AdamW,
        "lamb": Lamb,
        "hybrid": HybridAdam,
        "disk": HybridAdam,
    }
    return make[name](groups, lr=0.01, **({"nvme_offload_fraction": 1.0} if name == "disk" else {}))


def save(name: str, folder: Path, num_layers: int = 2) -> list[float | None]:
    """Train, save, train on; return the losses after the save."""
    run = Run(layout_of(name), 1, num_layers)
    run.train(range(BEFORE))
    path = save_training_state(folder / name, run.state, step=BEFORE)
    torch.save(run.wholes(), path.with_name(f"{REFERENCE} {gpc.get_global_rank()}"))
    losses = run.train(range(BEFORE, BEFORE + AFTER))
    gpc.destroy()
    return losses


def reference(saved: Path) -> Named:
    """Return what all ranks had when they saved."""
    merged: Named = {}
    for path in saved.glob(f"{REFERENCE} *"):
        merged |= torch.load(path)
    return merged


def load(name: str, sources: list[str], folder: Path, num_layers: int = 2) -> dict[str, list[float | None]]:
    """Load what was saved in several layouts, one after the other, and train; return the losses."""
    run = Run(layout_of(name), 2, num_layers)
    losses = {}
    for source in sources:
        saved = folder / source
        load_training_state(saved / f"step-{BEFORE:08d}", run.state)
        wrong = run.differences(reference(saved))
        assert not wrong, f"saved as {source}, loaded as {name}: {wrong[:8]} of {len(wrong)}"
        losses[source] = run.train(range(BEFORE, BEFORE + AFTER))
    gpc.destroy()
    return losses


def mean_losses(of_ranks: list[list[float | None]]) -> list[float]:
    """Return the mean over the ranks that know a loss, step by step."""
    steps = zip(*of_ranks, strict=True)
    return [sum(filter(None, losses)) / len(list(filter(None, losses))) for losses in steps]
