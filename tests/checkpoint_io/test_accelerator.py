"""On an accelerator: values and counters come back to the device they were on."""

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from colossalai.checkpoint_io import load_model, load_optimizer, parameter_names, save_model, save_optimizer
from tests.checkpoint_io.models import assert_same_state, batch, tied
from tests.checkpoint_io.test_optimizer import assert_same

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_round_trip_on_the_device(use_safetensors: bool, fused: bool, tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    model, other = tied(seed=1).to(device), tied(seed=2).to(device)
    optimizer, twin = (AdamW(one.parameters(), fused=fused) for one in (model, other))
    model(batch(0).to(device)).square().mean().backward()
    optimizer.step()
    save_model(model, tmp_path / "model", use_safetensors=use_safetensors)
    save_optimizer(
        optimizer, tmp_path / "x", param_names=parameter_names(model), use_safetensors=use_safetensors
    )
    load_model(other, tmp_path / "model")
    load_optimizer(twin, tmp_path / "x", param_names=parameter_names(other))
    assert_same_state(model, other)
    assert_same(optimizer.state_dict(), twin.state_dict())
