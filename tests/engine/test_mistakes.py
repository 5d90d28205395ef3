"""A user's mistake at a door: one sentence that says what would be right."""

from inspect import signature
from unittest import mock

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE, BF16Autocast, NaiveFP16, Precision, convert_to_amp
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.context import UnknownArgumentError
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import PipelineSchedule
from colossalai.logging import DistributedLogger
from colossalai.nn.parallel import Bucketed
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan
from colossalai.trainer import Trainer, hooks
from colossalai.utils import load_checkpoint, save_checkpoint
from colossalai.zero import ZeroReplicas
from tests.ranks import run_ranks
from tests.trainer.fakes import FakeEngine


def components():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (
            nn.Linear(3, 2),
            {},
            "engine is a Linear; it must be the first result of colossalai.initialize",
        ),
        (components()[1], {}, "engine is a SGD; it must be the first"),
        ((FakeEngine(), None, None, None), {}, "engine is a tuple; it must be the first"),
        (FakeEngine(), {"schedule": PipelineSchedule}, "schedule is <class .*; it must be an object such as"),
        (FakeEngine(), {"timer": True}, r"timer is True; it must be a MultiTimer\(\)"),
        (
            FakeEngine(),
            {"hooks": []},
            "Trainer has no argument 'hooks'; it has engine, schedule, timer, logger",
        ),
    ],
)
def test_what_a_trainer_is_not_made_of(engine, options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(engine, **options)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hooks": [hooks.LossHook]},
            r"the class LossHook is not a hook; give an object of it: LossHook\(\)",
        ),
        ({"hooks": hooks.LossHook()}, "it must be a list of hooks, such as"),
        ({"hooks": hooks.LossHook}, "it must be a list of hooks, such as"),
        ({"hooks": [print]}, "is not a hook; give instances of subclasses"),
        ({"hook": [hooks.LossHook()]}, "Trainer.fit has no argument 'hook': did you mean 'hooks'"),
        ({"max_step": 3}, "no argument 'max_step': did you mean 'max_steps'"),
        ({"display": True}, "no argument 'display': did you mean 'display_progress'"),
    ],
)
def test_what_cannot_be_fitted_with(options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(FakeEngine()).fit([], epochs=1, **options)


@pytest.mark.unit
def test_misspelt_arguments_of_the_doors():
    """They are a TypeError, as Python has it, too."""
    calls = [
        (lambda: colossalai.initialize(None, dataloader=[]), "initialize has no argument 'dataloader'"),
        (lambda: colossalai.launch_from_torch(cfg={}), "launch_from_torch has no argument 'cfg'"),
        (lambda: Booster(plugins=None), "Booster has no argument 'plugins': did you mean 'plugin'"),
        (lambda: TorchDDPPlugin(find_unused_parameter=True), "did you mean 'find_unused_parameters'"),
        (lambda: LowLevelZeroPlugin(max_grad_norm=1.0), "did you mean 'max_norm'"),
        (lambda: HybridParallelPlugin(tensor_size=2), "HybridParallelPlugin has no argument 'tensor_size'"),
        (lambda: hooks.SaveCheckpointHook(folder="a"), "SaveCheckpointHook has no argument 'folder'"),
        (lambda: PipelineSchedule(num_micro_batches=4), "did you mean 'num_microbatches'"),
        (lambda: save_checkpoint("a.pt", 1, nn.Linear(1, 1), optim=None), "did you mean 'optimizer'"),
    ]
    for call, message in calls:
        with pytest.raises(UnknownArgumentError, match=message) as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
    assert list(signature(TorchDDPPlugin).parameters)[:2] == ["broadcast_buffers", "bucket_cap_mb"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "h.pt", "model"), "file is 3; it must be a path: save_checkpoint"),
        (("h.pt", "3", "model"), "epoch is '3'; it must be an integer: save_checkpoint"),
        (("h.pt", True, "model"), "epoch is True; it must be an integer"),
        (
            ("h.pt", "model", 3),
            r"model is 3; it must be a torch.nn.Module: save_checkpoint\(file, epoch, model",
        ),
        (("h.pt", 3, "model", "schedule"), "optimizer is <.*StepLR.*; it must be a torch.optim.Optimizer"),
    ],
)
def test_arguments_of_save_checkpoint_in_another_order(arguments, message):
    model, optimizer = components()
    things = {"model": model, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    with pytest.raises(ValueError, match=message):
        save_checkpoint(*(things.get(each, each) if isinstance(each, str) else each for each in arguments))


@pytest.mark.unit
def test_arguments_of_load_checkpoint_in_another_order():
    with pytest.raises(
        ValueError, match=r"file is Linear\(.*; it must be a path: load_checkpoint\(file, model"
    ):
        load_checkpoint(nn.Linear(2, 2), "h.pt")


@pytest.mark.unit
@pytest.mark.parametrize("mode", ["TORCH", "fp16", None, AMP_TYPE])
def test_a_mode_that_is_none(mode):
    message = r"the mode is .*; it must be one of AMP_TYPE.TORCH, .* \(or 'torch', 'bf16', 'naive', 'apex'\)"
    with pytest.raises(ValueError, match=message):
        convert_to_amp(*components(), nn.MSELoss(), mode)


@pytest.mark.unit
def test_components_that_are_none():
    model, optimizer = components()
    with pytest.raises(ValueError, match=r"the model is a SGD; it must be a torch.nn.Module"):
        convert_to_amp(optimizer, model, nn.MSELoss())
    with pytest.raises(ValueError, match=r"the optimizer is a MSELoss; it must be a torch.optim.Optimizer"):
        convert_to_amp(model, nn.MSELoss(), optimizer)
    converted, wrapped, _ = convert_to_amp(model, optimizer, nn.MSELoss(), AMP_TYPE.BF16)
    with pytest.raises(ValueError, match="this optimizer has its precision already"):
        convert_to_amp(converted, wrapped, nn.MSELoss(), AMP_TYPE.BF16)
    with pytest.raises(ValueError, match=r"max_norm is 'a' and norm_type 2.0"):
        convert_to_amp(*components(), nn.MSELoss(), AMP_TYPE.NAIVE, {"clip_grad_norm": "a"})


class OwnPrecision(Precision):
    """Without options."""


@pytest.mark.unit
@pytest.mark.parametrize(
    ("plan", "shown"),
    [
        (Plan(), "DDP, the model's own precision"),
        (Plan(precision=OwnPrecision()), "DDP, OwnPrecision"),
        (
            Plan(data=ZeroReplicas(stage=2), precision=NaiveFP16(verbose=True), clip_grad_norm=1.0),
            "ZeRO 2, fp16 with fp32 masters (verbose=True), clip_grad_norm=1.0",
        ),
        (
            Plan(
                data=Bucketed(),
                precision=BF16Autocast(),
                pipeline=PipelineOptions(num_microbatches=8),
                accumulation_steps=2,
            ),
            "DDP, bf16 autocast, accumulation_steps=2, pipeline=PipelineOptions(num_microbatches=8)",
        ),
    ],
)
def test_a_plan_is_shown_by_its_choices(plan, shown):
    assert str(plan) == shown
    assert "broadcast_buffers=True" in repr(plan)


def in_a_job(folder):
    colossalai.launch_from_torch({"gradient_accumulation": 2}, verbose=False)
    engine, *_ = colossalai.initialize(*components(), nn.MSELoss(), verbose=False)
    model, optimizer, *_ = Booster().boost(*components())
    x = torch.ones(2, 3)
    doors = [(engine.backward, engine), (lambda loss: Booster().backward(loss, optimizer), model)]
    for backward, run in doors:
        for loss, message in [
            (3.0, r"the loss is 3.0; it must be the tensor that the criterion returned: None, .item\(\)"),
            (None, "the loss is None; it must be the tensor"),
            (run(x), r"the loss has shape \(2, 2\); it must be one number: take its mean first"),
            (run(x).mean().detach(), "the loss has no gradient: it was computed under torch.no_grad"),
        ]:
            with pytest.raises(ValueError, match=message):
                backward(loss)
    optimizer.backward(model(x), gradient=torch.ones(2, 2))
    for options, message in [
        ({"step": "7"}, "step is '7'; it must be an integer of at least 0"),
        ({"step": 7.0}, "step is 7.0"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": 1, "extra": object()}, "extra is <object .*; it must be a dict of plain values"),
        ({"step": 1, "extra": {"a": object()}}, "extra.*object"),
        ({"step": 1, "epoch": "2"}, "epoch is '2'; it must be an integer of at least 0, or None"),
        ({"step": 1, "every": 0}, "every is 0; it must be an integer of at least 1"),
        ({"step": 1, "keep_last": "2"}, "keep_last is '2'; it must be an integer of at least 1"),
        ({"step": 1, "keep": 2}, "save has no argument 'keep': did you mean 'keep_last'"),
    ]:
        for save in (
            engine.save,
            lambda *args, **options: Booster().save(*args, model, optimizer, **options),
        ):
            with pytest.raises(ValueError, match=message):
                save(folder, **options)
    gpc.destroy()


@pytest.mark.dist
def test_mistakes_in_a_job(tmp_path):
    run_ranks(in_a_job, 1, tmp_path)


def log_of_a_start():
    colossalai.launch_from_torch({"fp16": {"mode": AMP_TYPE.NAIVE}, "clip_grad_norm": 1.0}, verbose=False)
    with mock.patch.object(DistributedLogger, "info") as info:
        colossalai.initialize(*components(), nn.MSELoss())
    gpc.destroy()
    return info.call_args.args[0]


@pytest.mark.dist
def test_the_start_is_one_short_line():
    line = (
        "Linear, 8 parameters: DDP, fp16 with fp32 masters, clip_grad_norm=1.0; rank 0 holds 80 B "
        "(parameters 16 B, gradients 32 B, optimizer states 32 B)"
    )
    assert run_ranks(log_of_a_start, 1) == [line]
