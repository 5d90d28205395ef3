"""The documented options of the precisions and of the plugin of ZeRO, with their order and defaults."""

from inspect import signature

import pytest
import torch

from colossalai.amp import ApexPrecision, FP16Autocast, NaiveFP16
from colossalai.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from colossalai.booster.plugin import LowLevelZeroPlugin

pytestmark = pytest.mark.unit

DOCUMENTED = {
    FP16TorchMixedPrecision: {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
    },
    FP16ApexMixedPrecision: {
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    },
    FP16NaiveMixedPrecision: {
        "log_num_zeros_in_grad": False,
        "initial_scale": 2.0**32,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "max_scale": 2.0**32,
        "verbose": False,
    },
    LowLevelZeroPlugin: {
        "stage": 1,
        "precision": "auto",  # the only default that is not as documented: "bf16" is slow on many processors
        "initial_scale": 2.0**32,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
        "hysteresis": 2,
        "max_scale": 2.0**32,
        "max_norm": 0.0,
        "norm_type": 2.0,
        "reduce_bucket_size_in_m": 12.0,
        "communication_dtype": None,
        "overlap_communication": True,
        "cpu_offload": False,
        "verbose": False,
    },
}


@pytest.mark.parametrize("cls", DOCUMENTED)
def test_they_are_positional_in_this_order(cls):
    found = {
        name: each.default
        for name, each in signature(cls).parameters.items()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    }
    assert list(found.items()) == list(DOCUMENTED[cls].items())


@pytest.mark.parametrize(
    ("cls", "core", "option", "value"),
    [
        (FP16TorchMixedPrecision, FP16Autocast, "growth_interval", 7),
        (FP16ApexMixedPrecision, ApexPrecision, "opt_level", "O2"),
        (FP16NaiveMixedPrecision, NaiveFP16, "hysteresis", 3),
    ],
)
def test_an_option_reaches_the_core(cls, core, option, value):
    choice = cls(**{option: value})
    assert isinstance(choice, MixedPrecision)
    assert choice.precision() == core(**{option: value}) != core()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FP16TorchMixedPrecision, {"init_scale": -1.0}),
        (FP16NaiveMixedPrecision, {"hysteresis": 0}),
        (FP16ApexMixedPrecision, {"loss_scale": "static"}),
        (FP16ApexMixedPrecision, {"cast_model_outputs": torch.int8}),
        (BF16MixedPrecision, {"master_weights": "yes"}),
    ],
)
def test_a_mistake_is_said_when_the_object_is_made(cls, options):
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("init_")):
        cls(**options)
