"""GPT-2 of transformers between plans of ours and Hugging Face's folders, with the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.core import global_context as gpc
from tests.checkpoint_io.formats.test_transformers import TOKENS, gpt2, quiet
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
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=tensor_size, pp_size=2, num_microbatches=2))
    model, *_ = booster.boost(gpt2(seed=7).double().eval())
    booster.load_model(model, folder / "theirs")
    with torch.no_grad():
        done = booster.execute_pipeline(iter([BATCH]), model, return_loss=False, return_outputs=True)
    booster.save_model(model, folder / "ours", shard=True, size_per_shard=0.005, use_safetensors=True)
    gpc.destroy()
    output = done["outputs"]
    return output if output is None else output["logits"] if isinstance(output, dict) else output.logits


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_their_class_in_a_pipeline_and_tensor_parallelism(tensor_size: int, tmp_path: Path) -> None:
    model = gpt2(seed=1).double()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    outputs = [
        out for out in run_ranks(in_parallel, 2 * tensor_size, tmp_path, tensor_size) if out is not None
    ]
    assert len(outputs) == tensor_size
    assert all(torch.allclose(output, logits_of(model), rtol=0, atol=TOLERANCE) for output in outputs)
    opened, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(opened.eval()), logits_of(model))
