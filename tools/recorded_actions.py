"""Training steps, a save and a load, with the functions of the package that they enter.

Used by tools/reading_distance.py, which has the rule of counting, and by tests/runtime/step. torch and the
package are imported by ranks only: their package can be that of another checkout.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

BACKEND = "READING_DISTANCE_BACKEND"  # environment variable of the ranks
OPERATORS = "kernel/"  # replaced operators of torch: entered or not, depending on the processor
MODELS = "model_zoo/"
NOT_CALLED = ("<module>", "find_spec")  # Python's import system enters these
THEN = "then"  # of a future: calls back at once if the future is done, else another thread does later
HIDDEN, VOCABULARY = 32, 64
NUM_SHOWN = 40  # lines of each list of an explanation


class Entry(NamedTuple):
    """One function of the package that was entered.

    Attributes:
        file: Path below the package.
        function: Qualified name.
    """

    file: str
    function: str


class Recorder:
    """A profile function that records the entered functions of a package, in order.

    Args:
        package: Folder of the package.
    """

    def __init__(self, package: Path) -> None:
        self._prefix = str(package) + os.sep
        self._codes: list[CodeType] = []
        self._is_then = False  # whether the event before is a call of `THEN`

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take one event of `sys.setprofile`."""
        is_callback, self._is_then = self._is_then, event == "c_call" and arg.__name__ == THEN
        if event == "call" and not is_callback and frame.f_code.co_filename.startswith(self._prefix):
            self._codes.append(frame.f_code)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the block, in this thread, without the garbage collector, whose time is not ours."""
        gc.collect()
        gc.disable()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()

    def entries(self) -> list[Entry]:
        """Return the recorded entries, without those that do not count."""
        entries = [
            Entry(code.co_filename[len(self._prefix) :], code.co_qualname)
            for code in self._codes
            if code.co_name not in NOT_CALLED
        ]
        return [entry for entry in entries if not entry.file.startswith(OPERATORS)]


def figures(entries: list[Entry]) -> dict[str, Any]:
    """Return the figures of an action: `files`, `switches` and `calls` without models, and `model_files`."""
    counted = [entry for entry in entries if not entry.file.startswith(MODELS)]
    files = {entry.file for entry in counted}
    return {
        "files": len(files),
        "switches": len(_switches(counted)),
        "calls": len(counted),
        "model_files": len({entry.file for entry in entries} - files),
        "names": sorted(files),
    }


def explanation(entries: list[Entry]) -> list[str]:
    """Return the most frequent switches, the most frequent functions, and the files, as lines of text."""
    counted = [entry for entry in entries if not entry.file.startswith(MODELS)]
    switches = Counter(f"{before.file} -> {after.file}" for before, after in _switches(counted))
    functions = Counter(f"{entry.file}: {entry.function}" for entry in counted)
    files = Counter(entry.file for entry in counted)
    lists = {"switches": switches, "functions": functions, "files": files}
    lines = []
    for name, found in lists.items():
        lines += ["", f"The most frequent {name}, of {found.total()} ({len(found)} different):"]
        lines += [f"{count:5}  {what}" for what, count in found.most_common(NUM_SHOWN)]
    return lines[1:]


def _switches(entries: list[Entry]) -> list[tuple[Entry, Entry]]:
    pairs = itertools.pairwise(entries)
    return [(before, after) for before, after in pairs if before.file != after.file]


@dataclass(frozen=True)
class Action:
    """An action that ranks can do again and again.

    Attributes:
        subject: The model and the method, for the table.
        enters: Folder of the package that the action must enter, else its method is not at work.
        prepare: Launches the job, builds the model, and returns the action; takes an empty folder.
        num_ranks: Number of ranks.
    """

    subject: str
    enters: str
    prepare: Callable[[Path], Callable[[], Any]]
    num_ranks: int = 2


def record(name: str, folder: Path) -> list[Entry]:
    """Run an action three times in a rank, and return the entries of the third run.

    Args:
        name: A key of `ACTIONS`.
        folder: Folder for files of an action; the same for all ranks.

    Raises:
        RuntimeError: The action does not enter the code of its method.
    """
    action = ACTIONS[name].prepare(folder)
    import colossalai

    action()
    action()
    recorder = Recorder(Path(colossalai.__file__).parent)
    with recorder.recording():
        action()
    entries = recorder.entries()
    if not any(entry.file.startswith(ACTIONS[name].enters) for entry in entries):
        raise RuntimeError(
            f"{name}: no function of {ACTIONS[name].enters} was entered: is the method at work?"
        )
    return entries


def _launch(**config: Any) -> None:
    import torch

    import colossalai

    colossalai.launch_from_torch(config, backend=os.environ.get(BACKEND, "gloo"), verbose=False)
    torch.manual_seed(0)


def _plain() -> Any:
    """Return a model of torch's own layers, its criterion, and a batch."""
    import torch
    from torch import nn

    layer = partial(nn.TransformerEncoderLayer, HIDDEN, 2, 2 * HIDDEN, dropout=0.0, batch_first=True)
    layers = nn.Sequential(layer(), layer())
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), layers, nn.Linear(HIDDEN, VOCABULARY))
    return model, _cross_entropy, torch.randint(0, VOCABULARY, (4, 16))


def _gpt() -> Any:
    import torch

    from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss

    sizes = GPTConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_layers=2,
    )
    return GPT(sizes), GPTLMLoss(), torch.randint(0, VOCABULARY, (4, 16))


def _experts() -> Any:
    import torch
    from torch import nn

    from colossalai.nn import MoeLoss
    from colossalai.nn.layer.moe import FFNExperts, MoeModule

    layers = nn.Sequential(
        *(MoeModule(HIDDEN, 4, top_k=2, expert_instance=FFNExperts(4, HIDDEN, 2 * HIDDEN)) for _ in range(2))
    )
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), layers, nn.Linear(HIDDEN, VOCABULARY))
    return model, MoeLoss(0.01, lambda: _cross_entropy), torch.randint(0, VOCABULARY, (4, 16))


def _linear_layers() -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return model, nn.MSELoss(), torch.randn(4, 8)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    from torch import nn

    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _engine(build: Callable[[], Any]) -> Any:
    """Return an engine of the model from `build` with AdamW, and the batch."""
    import torch

    import colossalai

    model, criterion, batch = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    return engine, batch


def _engine_step(build: Callable[[], Any], config: dict[str, Any], _: Path) -> Callable[[], Any]:
    _launch(clip_grad_norm=1.0, **config)
    engine, batch = _engine(build)

    def step() -> None:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(batch), batch))
        engine.step()

    return step


def _pipeline_step(_: Path) -> Callable[[], Any]:
    pipeline = {"size": 2, "partition": "balanced"}
    _launch(clip_grad_norm=1.0, parallel={"pipeline": pipeline}, NUM_MICRO_BATCHES=4)
    engine, batch = _engine(_plain)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([(batch, batch)]), return_output_label=False)
        engine.step()

    return step


def _plugin_step(plugin: str, options: dict[str, Any], _: Path) -> Callable[[], Any]:
    import torch

    from colossalai.booster import Booster
    from colossalai.booster import plugin as plugins

    _launch()
    model, criterion, batch = _plain()
    booster = Booster(plugin=getattr(plugins, plugin)(precision="fp32", max_norm=1.0, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)

    def step() -> None:
        optimizer.zero_grad()
        booster.backward(criterion(model(batch), batch), optimizer)
        optimizer.step()

    return step


def _trained_engine() -> Any:
    _launch(clip_grad_norm=1.0)
    engine, batch = _engine(_linear_layers)
    engine.backward(engine.criterion(engine(batch), batch))
    engine.step()
    return engine


def _save(folder: Path) -> Callable[[], Any]:
    engine, steps = _trained_engine(), itertools.count(1)
    return lambda: engine.save(folder, step=next(steps))


def _load(folder: Path) -> Callable[[], Any]:
    engine = _trained_engine()
    engine.save(folder, step=1)
    return lambda: engine.load(folder)


ACTIONS = {
    "Engine step": Action(
        "plain torch model of 2 blocks, 2 data-parallel ranks; forward, backward, clip, step",
        "engine/",
        partial(_engine_step, _plain, {}),
    ),
    "tensor-parallel step": Action(
        "GPT of 2 blocks, 2 ranks of tensor 1d",
        "nn/layer/",
        partial(_engine_step, _gpt, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}),
    ),
    "pipeline step": Action(
        "plain torch model, 2 stages, 1F1B, 4 microbatches; execute_schedule, step",
        "pipeline/",
        _pipeline_step,
    ),
    "ZeRO-2 step": Action(
        "plain torch model, LowLevelZeroPlugin(stage=2), 1 rank",
        "zero/",
        partial(_plugin_step, "LowLevelZeroPlugin", {"stage": 2}),
        num_ranks=1,
    ),
    "Gemini step": Action(
        "plain torch model, GeminiPlugin, 1 rank",
        "zero/gemini/",
        partial(_plugin_step, "GeminiPlugin", {}),
        num_ranks=1,
    ),
    "step with experts": Action(
        "2 layers of 4 experts, 2 ranks that share them",
        "nn/layer/moe/",
        partial(_engine_step, _experts, {"parallel": {"moe": {"size": 2}}}),
    ),
    "save": Action(
        "2 linear layers, 2 data-parallel ranks, AdamW; Engine.save",
        "checkpoint_io/",
        _save,
    ),
    "load": Action("Engine.load of the same", "checkpoint_io/", _load),
}
