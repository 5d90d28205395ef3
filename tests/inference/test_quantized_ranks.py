"""Quantized models over ranks: the codes are those of one process, cut, and so are the texts."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.inference._build import engine_of_ranks
from colossalai.inference._llm import Collector
from colossalai.inference._load import EngineOptions, load_model
from colossalai.inference._request import Request, SamplingParams
from colossalai.inference.loading import save_quantized
from colossalai.inference.products import QuantizedLinear
from colossalai.tensor import spec_of
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.test_quantized import NUM_TOKENS, TIES, assert_same_but_ties
from tests.ranks import run_ranks
from tests.tiers import further

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist
# The groups of int4:32 are not cut, and the vocabulary is padded.
SIZES: dict[str, dict[str, int]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 203, "num_hidden_layers": 2},
    "GPT2": {"n_embd": 64, "n_layer": 2},
    "OPT": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64, "num_hidden_layers": 2},
}
FIRST_CODES = {("OPT", "int4:32")}


def launched(tp: int, pp: int) -> Mesh:
    parallel = {"pipeline": {"size": pp}, "tensor": {"size": tp, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh: Mesh = gpc.mesh
    return mesh


def answers(folder: str, tp: int, pp: int, quantize: str | None) -> Any:
    """Return the greedy texts on rank 0."""
    settings = EngineOptions(kv_memory=2**22, quantize=quantize)
    engine = engine_of_ranks(folder, settings, mesh=launched(tp, pp))
    if engine is None:
        return None
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    collectors = [
        Collector(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
        for number, prompt in enumerate(prompts(*MIXED))
    ]
    for collector in collectors:
        engine.submit(collector.request, collector.on_delta)
    while engine.has_work:
        engine.step()
    engine.executor.close()
    return [collector.output().outputs[0].token_ids for collector in collectors]


def wholes(folder: str, saved: str, quantize: str) -> list[dict[str, torch.Tensor]]:
    """Return the codes, scales and zero points of all ranks together: as made, and as saved and loaded."""
    mesh = launched(2, 1)
    model = load_model(folder, EngineOptions(quantize=quantize), mesh)
    made = put_together(model)
    save_quantized(model, saved)
    dist.barrier()
    return [made, put_together(load_model(saved, EngineOptions(), mesh))]


def put_together(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            for key in ("codes", "scales", "zeros"):
                tensor = getattr(layer, key)
                if tensor is not None:
                    spec = spec_of(tensor)
                    assert spec is not None
                    found[f"{name}.{key}"] = spec.whole(tensor)
    return found


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if (family, name) in FIRST_CODES else pytest.mark.long)
        for family in SIZES
        for name in ("int8-weights", "int8", "int4:32")
    ],
)
def test_cut_and_whole_have_the_same_codes_and_are_saved_alike(
    family: str, name: str, tmp_path: Path
) -> None:
    tiny(family, **SIZES[family]).save_pretrained(tmp_path / "plain")
    saved = str(tmp_path / "saved")
    expected = {
        key: value
        for key, value in load_model(str(tmp_path / "plain"), EngineOptions(quantize=name))
        .state_dict()
        .items()
        if key.endswith((".codes", ".scales", ".zeros"))
    }
    for found in chain(*run_ranks(wholes, 2, str(tmp_path / "plain"), saved, name)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    loaded = load_model(saved, EngineOptions()).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("family", "name", "tp", "pp"),
    [
        further("Llama", "int8", 2, 2),
        further("Llama", "int8-weights", 2, 1),
        ("Llama", "int8", 2, 1),
        further("GPT2", "int8-weights", 2, 1),
        further("OPT", "int4:32", 2, 1),
        further("Llama", "int8-weights", 2, 2),
        further("Llama", "int4:32", 2, 1),
    ],
)
def test_texts_over_ranks_are_those_of_one_process(
    family: str, name: str, tp: int, pp: int, tmp_path: Path
) -> None:
    tiny(family, **SIZES[family]).save_pretrained(tmp_path)
    found, *others = run_ranks(answers, tp * pp, str(tmp_path), tp, pp, name)
    assert others == [None] * (tp * pp - 1)
    model = load_model(str(tmp_path), EngineOptions(quantize=name))
    # With int8 a rank rounds its part of a row by the largest of that part: other codes than for whole rows.
    bound = 0.1 if name == "int8" else TIES[name]
    for prompt, text in zip(prompts(*MIXED), found, strict=True):
        assert_same_but_ties(model, prompt, text, greedy(model, prompt, NUM_TOKENS), bound)
