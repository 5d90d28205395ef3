"""GPT-2 between pipelines, tensor parallelism and Hugging Face's folders, with the same logits.

Their class runs in a pipeline as it is. It has no tensor-parallel layers yet: under both, the GPT of the
model zoo runs with its weights, and the file that it saves is taken over by their class.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import from_hugging_face, to_hugging_face
from colossalai.model_zoo.gpt._hugging_face import config_of
from tests.checkpoint_io.test_transformers import TOKENS, gpt2, quiet
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.dist
__all__ = ["quiet"]

BATCH = TOKENS.repeat(2, 1)
TOLERANCE = 1e-10  # float64


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(BATCH).logits


def in_parallel(folder: Path, tensor_size: int) -> torch.Tensor | None:
    """Load their folder, run it, save it again; return the logits on the ranks that have them."""
    tensor = {"size": tensor_size, "mode": "1d" if tensor_size > 1 else None}
    colossalai.launch_from_torch({"parallel": {"pipeline": 2, "tensor": tensor}}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tensor_size, pp_size=2, num_microbatches=2))
    if tensor_size > 1:
        theirs = transformers.GPT2LMHeadModel.from_pretrained(folder / "theirs").eval()
        model, *_ = booster.boost(from_hugging_face(theirs).double().eval())
    else:
        model, *_ = booster.boost(gpt2(seed=7).double().eval())
        booster.load_model(model, folder / "theirs")
    model.eval()
    with torch.no_grad():
        done = booster.execute_pipeline(iter([BATCH]), model, return_loss=False, return_outputs=True)
    booster.save_model(model, folder / "ours", shard=tensor_size == 1, use_safetensors=tensor_size == 1)
    gpc.destroy()
    output = done["outputs"]
    return (
        output.logits
        if hasattr(output, "logits")
        else output["logits"]
        if isinstance(output, dict)
        else output
    )


def test_their_class_in_a_pipeline(tmp_path: Path) -> None:
    model = gpt2(seed=1).double()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    outputs = [output for output in run_ranks(in_parallel, 2, tmp_path, 1) if output is not None]
    assert all(torch.allclose(output, logits_of(model), rtol=0, atol=TOLERANCE) for output in outputs)
    assert outputs
    opened, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(opened.eval()), logits_of(model))


def test_in_a_pipeline_with_tensor_parallelism(tmp_path: Path) -> None:
    model = gpt2(seed=1).double()
    model.save_pretrained(tmp_path / "theirs")
    outputs = [output for output in run_ranks(in_parallel, 4, tmp_path, 2, timeout=120) if output is not None]
    assert len(outputs) == 2
    assert all(torch.allclose(output, logits_of(model), rtol=0, atol=TOLERANCE) for output in outputs)
    opened = gpt2(seed=9).double()
    weights = torch.load(tmp_path / "ours", weights_only=True)
    opened.load_state_dict(to_hugging_face(weights, config_of(model.config)))
    opened.save_pretrained(tmp_path / "back")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back", dtype=torch.float64).eval()
    assert torch.equal(logits_of(again), logits_of(model))
