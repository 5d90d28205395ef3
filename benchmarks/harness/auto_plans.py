"""Small models trained by plans of Colossal-Auto, each over its own mesh.

A job has one layout. To run several plans in one job, each plan is assembled over its own mesh, which uses
the groups of the job's mesh. The rest is as in `AutoPlugin`: the plan is lowered to a `runtime.Plan`, and
`assemble` carries it out.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from harness.rounds import time_rounds
from torch import Tensor, nn

from colossalai.auto_parallel import AutoPlan
from colossalai.context import Layout, Mesh
from colossalai.core import global_context as gpc
from colossalai.model_zoo.bert import Bert, BertConfig
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.resnet import ResNet
from colossalai.model_zoo.vit import ViT, ViTConfig
from colossalai.runtime import TrainingStep, assemble
from colossalai.utils import get_current_device

NO_DROPOUT = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)
PHASES = ("forward", "backward", "update")
_SAME = 1e-3  # relative tolerance of equal losses


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its batch.

    Attributes:
        build: Function that returns the model.
        argument: Name of the forward's argument.
        batch: Inputs and labels of all ranks.
        optimizer: Name of the optimizer in a plan: "adamw" or "momentum".
    """

    build: Callable[[], nn.Module]
    argument: str
    batch: tuple[Tensor, Tensor]
    optimizer: str = "adamw"

    def meta_args(self) -> dict[str, Tensor]:
        """Return the arguments of a forward on the whole batch, without memory."""
        return {self.argument: self.batch[0].to("meta")}

    def build_on_meta(self) -> nn.Module:
        """Return the model without memory."""
        with torch.device("meta"):
            return self.build().train()


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    logits = output if isinstance(output, Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def cases_of(args: argparse.Namespace) -> Mapping[str, Case]:
    """Return GPT, BERT, ViT and ResNet with the sizes of the options; see `add_sizes`."""
    sizes = {
        "hidden_size": args.hidden,
        "num_layers": args.layers,
        "num_attention_heads": max(args.hidden // 64, 1),
        **NO_DROPOUT,
    }
    words = {"vocab_size": args.vocab, "max_position_embeddings": args.seq}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab, (args.batch, args.seq), generator=generator)
    images = torch.randn(args.batch, 3, args.image, args.image, generator=generator)
    classes = torch.randint(10, (args.batch,), generator=generator)
    shape = ViTConfig(image_size=args.image, patch_size=args.patch, num_classes=10, **sizes)
    return {
        "gpt": Case(
            build=partial(GPT, GPTConfig(**words, **sizes)), argument="input_ids", batch=(tokens, tokens)
        ),
        "bert": Case(
            build=partial(Bert, BertConfig(**words, **sizes)), argument="input_ids", batch=(tokens, tokens)
        ),
        "vit": Case(build=partial(ViT, shape), argument="images", batch=(images, classes)),
        "resnet": Case(
            build=partial(ResNet, (2, 2, 2, 2), num_classes=10, small_input=True, width=args.width),
            argument="images",
            batch=(images, classes),
            optimizer="momentum",
        ),
    }


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model sizes."""
    add = partial(parser.add_argument, type=int)
    add("--hidden", default=256, help="features of a token (default: %(default)s)")
    add("--layers", default=6, help="blocks of a transformer (default: %(default)s)")
    add("--vocab", default=2048, help="tokens that there are (default: %(default)s)")
    add("--seq", default=128, help="tokens in a sequence (default: %(default)s)")
    add("--batch", default=16, help="samples of all ranks (default: %(default)s)")
    add("--image", default=32, help="pixels of a side of an image (default: %(default)s)")
    add("--patch", default=4, help="pixels of a side of ViT's patches (default: %(default)s)")
    add("--width", default=32, help="channels of ResNet's first stage (default: %(default)s)")


class PlannedModel:
    """A model that is trained by a plan; every rank builds it.

    Args:
        plan: The plan, of all ranks of the job.
        case: Model and batch.

    Attributes:
        seconds: Seconds of each phase of the last step, by `PHASES`; a pipeline counts its backward as
            forward.
    """

    def __init__(self, plan: AutoPlan, case: Case) -> None:
        lowered = plan.runtime_plan()
        assert lowered.layout is not None, "a produced plan has a layout"
        mesh = _mesh_of(lowered.layout)
        device = get_current_device()
        torch.manual_seed(0)
        model = case.build().train()
        optimizer_of_user = make_optimizer(case.optimizer, model, is_sharded=plan.setting.zero == 3)
        wrapped, optimizer = assemble(lowered, model, optimizer_of_user, mesh=mesh, device=device)
        assert optimizer is not None, "one was given"
        self._step = TrainingStep(wrapped, optimizer)
        self._optimizer = optimizer
        self._is_pipeline = lowered.pipeline is not None
        part = slice(mesh.axis_rank("dp"), None, mesh.axis_size("dp"))
        self._batch = tuple(tensor[part].to(device) for tensor in case.batch)
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def step(self) -> Tensor:
        """Train on the batch once; return the loss of this rank's part."""
        inputs, labels = self._batch
        times = [time.perf_counter()]
        self.zero_grad()
        if self._is_pipeline:
            loss = self._step.run_pipeline(inputs, labels, loss_of).loss
            times += [time.perf_counter()] * 2
        else:
            loss = loss_of(self._step.forward(inputs), labels)
            times.append(time.perf_counter())
            self._step.backward(loss)
            times.append(time.perf_counter())
        self._step.step()
        times.append(time.perf_counter())
        assert loss is not None, "the pipeline step returns its loss"
        self.seconds = {
            name: end - start for name, start, end in zip(PHASES, times[:-1], times[1:], strict=True)
        }
        return loss.detach()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        self._optimizer.zero_grad()


def make_optimizer(name: str, model: nn.Module, *, is_sharded: bool) -> torch.optim.Optimizer:
    """Return the optimizer with a plan's name for it."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # torch has no fused SGD of DTensors.
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=None if is_sharded else True)


def _mesh_of(layout: Layout) -> Mesh:
    """Return the mesh of a layout, with the groups of the job."""
    mesh = Mesh(
        layout.over(gpc.mesh.world_size).axes(),
        rank=gpc.mesh.rank,
        device_type=gpc.mesh.device_type,
        views={"dp": ("edp", "ep")},
    )
    mesh.take_groups_of(gpc.mesh)
    return mesh


class Model(Protocol):
    """Interface of a model that is trained."""

    seconds: dict[str, float]

    def step(self) -> Tensor:
        """Train on the batch once; return the loss of this rank's part."""

    def zero_grad(self) -> None:
        """Release the gradients, as at the begin of a step."""


class Turns:
    """Models that take turns; only one exists at a time.

    Args:
        builds: Functions that build the models, by name.
        show: Function that is called with the name of the running model.

    Attributes:
        phases: Seconds of each phase for every turn: medians of the timed steps.
    """

    def __init__(self, builds: Mapping[str, Callable[[], Model]], show: Callable[[str], None]) -> None:
        self.phases: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
        self._builds, self._show = builds, show
        self._model: Model | None = None
        self._steps: list[dict[str, float]] = []  # phases of each step
        self._timed = 1

    def time(self, *, rounds: int, repeats: int, timed: int = 1) -> dict[str, list[float]]:
        """Return the step seconds of each model on its slowest rank, one value per round.

        Args:
            rounds: Number of turns of each model.
            repeats: Number of steps in a turn.
            timed: Number of timed steps at the end of a turn, of which the median counts.
        """
        self._timed = timed
        times: dict[str, list[float]] = largest(
            time_rounds(
                dict.fromkeys(self._builds, self.step),
                rounds=rounds,
                warmup=0,
                repeats=repeats,
                timed=timed,
                around={name: partial(self.built, name) for name in self._builds},
            )
        )
        return times

    def check_same(self) -> None:
        """Require that all models have the same first loss, up to rounding."""
        losses = {}
        for name in self._builds:
            with self.built(name):
                loss = self.step().double()
            dist.all_reduce(loss)
            losses[name] = loss.item() / dist.get_world_size()
            self.phases[name].clear()
        middle = statistics.median(losses.values())
        for name, loss in losses.items():
            if abs(loss - middle) > _SAME * abs(middle):
                raise AssertionError(f"{name} trains otherwise: its loss is {loss}, that of others {middle}")

    @contextmanager
    def built(self, name: str) -> Iterator[Model]:
        """Build a model that exists within the block, for `step`."""
        self._show(name)
        self._model = model = self._builds[name]()
        self._steps.clear()
        try:
            yield model
            steps = self._steps[-self._timed :]
            self.phases[name].append(
                {phase: statistics.median(each[phase] for each in steps) for phase in model.seconds}
            )
        finally:
            self._model = model = None  # type: ignore[assignment]  # the caller's name is all that is left
            gc.collect()

    def step(self) -> Tensor:
        """Train the current model."""
        assert self._model is not None, "within `built`"
        loss = self._model.step()
        self._steps.append(dict(self._model.seconds))
        return loss


def largest(values: Any) -> Any:
    """Return the largest value of any rank: of numbers, of lists of them, of dicts of those; on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return _largest_of(found)


def _largest_of(found: list[Any]) -> Any:
    if isinstance(found[0], Mapping):
        return {key: _largest_of([each[key] for each in found]) for key in found[0]}
    if isinstance(found[0], list):
        return [max(each) for each in zip(*found, strict=True)]
    return max(found)


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Show the name of the running model on a terminal of rank 0."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal or (dist.is_initialized() and dist.get_rank() != 0):
        yield lambda _: None
        return
    with console.status("measuring") as status:
        yield status.update
