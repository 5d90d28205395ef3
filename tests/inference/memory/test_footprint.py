"""What `serving_memory` counts is what ranks hold that have loaded the model, byte for byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.inference import EngineOptions, StageMemory, serving_memory
from colossalai.inference._build import _make_runner
from colossalai.inference._load import load_model
from colossalai.inference._ranks import StepLink
from colossalai.inference.products import QuantizedLinear
from colossalai.inference.products._quantized_products import pack_codes
from tests.harness.allocations import Allocations
from tests.inference.models import tiny
from tests.ranks import run_ranks
from tests.tiers import further

pytest.importorskip("transformers")

# The vocabulary is padded over ranks; the groups of int4:32 are not cut.
SIZES: dict[str, dict[str, int]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 203},
    "GPT2": {"n_embd": 64},
    "OPT": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 64},
    "Bloom": {"hidden_size": 64, "vocab_size": 203},
    "Phi3": {"hidden_size": 64, "intermediate_size": 64},
    "Mixtral": {"hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 2, "vocab_size": 203},
}
CELLS = [
    further("Llama", None, "auto", 2, 2),
    further("Llama", "int8", "int8", 2, 1),
    ("GPT2", "int4:32", "auto", 1, 2),
    further("OPT", "int8-weights", "auto", 2, 2),
    further("OPT", "int8-weights", "auto", 2, 1),
    further("Bloom", "int8", "auto", 2, 2),
    further("Phi3", None, "auto", 2, 1),
    ("Mixtral", "int8", "int8", 2, 1),
    further("Mixtral", "int8", "auto", 2, 1),
]


def held_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def held(folder: str, options: EngineOptions, tp: int, pp: int) -> tuple[int, int]:
    """Return the bytes of the weights that this rank has loaded, and of a block of its cache."""
    parallel = {"pipeline": {"size": pp}, "tensor": {"size": tp, "mode": "1d"}}
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    mesh: Mesh = gpc.mesh
    model = load_model(folder, options, mesh)
    num_bytes = held_bytes(model)
    runner, _, num_blocks = _make_runner(model, options, StepLink(mesh, torch.device("cpu")))
    pools = [pool for cache in runner._caches.values() for pool in cache.pools]
    assert sum(pool.nbytes for pool in pools) == num_blocks * runner.bytes_per_block
    return num_bytes, runner.bytes_per_block


@pytest.mark.dist
@pytest.mark.parametrize(("family", "quantize", "kv_dtype", "tp", "pp"), CELLS)
def test_ranks_hold_what_is_counted(
    family: str, quantize: str | None, kv_dtype: str, tp: int, pp: int, tmp_path: Path
) -> None:
    tiny(family, **SIZES[family]).save_pretrained(tmp_path)
    options = EngineOptions(quantize=quantize, kv_dtype=kv_dtype, kv_memory=2**22, block_size=8)
    loaded = run_ranks(held, tp * pp, str(tmp_path), options, tp, pp)
    counted = serving_memory(tmp_path, options, tp=tp, pp=pp)
    assert [rank for stage in counted.stages for rank in stage.ranks] == list(range(tp * pp))
    assert [
        (stage.weight_bytes, stage.block_bytes) for stage in counted.stages for _ in stage.ranks
    ] == loaded


@pytest.mark.unit
def test_a_folder_that_was_saved_in_codes_is_counted_in_codes(tmp_path: Path) -> None:
    from colossalai.inference import save_quantized

    tiny("Llama", **SIZES["Llama"]).save_pretrained(tmp_path / "plain")
    model = load_model(tmp_path / "plain", EngineOptions(quantize="int8"))
    save_quantized(model, tmp_path / "saved")
    (stage,) = serving_memory(tmp_path / "saved", EngineOptions()).stages
    assert stage.weight_bytes == held_bytes(model)
    with pytest.raises(ValueError, match="was saved as int8"):
        serving_memory(tmp_path / "saved", EngineOptions(quantize="int4:32"))


@pytest.mark.unit
@pytest.mark.parametrize("quantize", [None, "int8", further("int8-weights"), further("int4")])
def test_what_packing_on_a_cpu_adds(quantize: str | None, tmp_path: Path) -> None:
    """Integer products keep an offset of 8 bytes for each output, and oneDNN, on some machines, 4 of sums."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    tiny("Llama", **sizes).save_pretrained(tmp_path)
    options = EngineOptions(quantize=quantize, kv_memory=2**22, is_owned=True)
    (stage,) = serving_memory(tmp_path, options).stages
    model = load_model(tmp_path, options)
    outputs = sum(part.scales.shape[0] for part in model.modules() if isinstance(part, QuantizedLinear))
    runner, *_ = _make_runner(model, options, None)
    found: dict[int, torch.Tensor] = {}
    _collect(runner.model, found, set())
    packed = sum(_nbytes(tensor) for tensor in found.values())
    # Some machines fill outputs up to 64.
    probe, *_ = pack_codes(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64))
    sums = int(torch.ops.mkldnn._nbytes(probe)) // 64 - 64
    assert sums in (0, 4)
    added = (8 + sums) * outputs if quantize in ("int8", "int8-weights") else 0
    assert packed == pytest.approx(
        stage.weight_bytes + added, abs=256
    )  # the angles of positions are there once


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_meta:  # what a quantized layer was made of, which new weights are compared with
        return 0
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


def _collect(value: Any, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    """Note the tensors that a model holds, those that its products have packed included."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif isinstance(value, dict):
        for part in value.values():
            _collect(part, found, seen)
    elif isinstance(value, list | tuple):
        for part in value:
            _collect(part, found, seen)
    elif type(value).__module__.startswith(
        ("colossalai.inference.products", "torch.nn", "transformers.models")
    ):
        _collect(vars(value), found, seen)


@cache
def stage_of_bloom(quantize: str | None) -> StageMemory:
    """Return the one stage of the largest model on eight ranks; it takes most of a second to count."""
    (stage,) = serving_memory("bloom_175B", EngineOptions(quantize=quantize), tp=8).stages
    return stage


@pytest.mark.unit
@pytest.mark.parametrize(("quantize", "bits"), [(None, 16), ("int8", 8), further("int4:128", 4)])
def test_bloom_of_175_billion_on_eight_ranks(quantize: str | None, bits: int) -> None:
    """Table 3 of 2211.05100: 70 blocks of 14,336 features, 250,880 tokens; the headline of the tutorial."""
    hidden, blocks, vocab, ranks = 14336, 70, 250880, 8
    matrices = 12 * hidden**2 * blocks  # 3 h^2 of the attention's inputs, h^2 behind it, 8 h^2 of the MLP
    expected = (matrices * bits / 8 + vocab * hidden * 2) / ranks
    if quantize is not None:
        expected += vocab * hidden * bits / 8 / ranks  # the head has codes of its own beside the embedding
    if bits == 4:
        expected += (matrices + vocab * hidden) / 128 * 4 / ranks  # a scale and a zero point, bfloat16 each
    stage = stage_of_bloom(quantize)
    assert stage.weight_bytes == pytest.approx(expected, rel=0.03)
    assert stage.block_bytes == 16 * blocks * 2 * hidden * 2 // ranks
    if quantize == "int8":
        plain = stage_of_bloom(None)
        assert stage.weight_bytes / plain.weight_bytes == pytest.approx(0.5, abs=0.03)
    assert all(rank in stage.ranks for rank in range(ranks))


@pytest.mark.unit
def test_nothing_gets_memory() -> None:
    with Allocations(with_objects=False) as planning:
        assert serving_memory("bloom_175B", EngineOptions(), tp=8).num_params == 176_247_271_424
    assert planning.tensors < 2**20  # of 353 GiB


@pytest.mark.unit
def test_requests_that_fit() -> None:
    found = serving_memory("opt_125M", EngineOptions(block_size=32, max_length=100))
    (stage,) = found.stages
    assert found.blocks_per_request == 4
    assert found.token_bytes(stage) == 2 * 12 * 768 * 2
    one = found.cache_bytes(stage, 1)
    assert one == 4 * 32 * 2 * 12 * 768 * 2
    for memory, fitting in (
        (stage.weight_bytes - 1, -1),
        (stage.weight_bytes, 0),
        (stage.weight_bytes + 3 * one - 1, 2),
        (stage.weight_bytes + 3 * one, 3),
    ):
        assert found.num_fitting(stage, memory) == fitting
    assert isinstance(stage, StageMemory)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "options", "tp", "said"),
    [
        ("FalconConfig", {}, 1, "does not go through the attention interface"),
        ("MambaConfig", {}, 1, "layers of the types"),
        ("LlamaConfig", {"max_length": 9999}, 1, "max_length=9999"),
        ("LlamaConfig", {}, 3, "3"),
    ],
)
def test_what_cannot_be_served_is_refused(kind: str, options: dict[str, int], tp: int, said: str) -> None:
    import transformers

    with pytest.raises(ValueError, match=said):
        serving_memory(lambda: getattr(transformers, kind)(), EngineOptions(**options), tp=tp)  # type: ignore[arg-type]
