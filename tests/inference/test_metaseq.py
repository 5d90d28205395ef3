"""Models are filled from checkpoints of any maker, whole or cut, and what does not fit is said at once."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.checkpoint_io import save_checkpoint, save_model
from colossalai.core import global_context as gpc
from colossalai.inference.loading._metaseq import load_values, open_checkpoint
from colossalai.inference.models import bloom_560M, opt_125M, resolve_model
from colossalai.lazy import is_lazy
from colossalai.pipeline import cut_model
from colossalai.shardformer import shard_model
from colossalai.tensor import spec_of
from tests.inference.metaseq import metaseq_tensors, write_metaseq
from tests.ranks import run_ranks
from tests.tiers import further

transformers = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 41, "max_position_embeddings": 16}


def tiny_opt(**options: Any) -> Any:
    """Return the config of an OPT with an embedding of another width."""
    widths = {"hidden_size": 16, "ffn_dim": 32, "word_embed_proj_dim": 8}
    return opt_125M(**{**SIZES, **widths, "dtype": "float32", **options})


def tiny_bloom() -> Any:
    return bloom_560M(n_layer=2, n_head=4, hidden_size=16, vocab_size=41, dtype="float32")


def tiny_neox() -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPTNeoXConfig(hidden_size=16, intermediate_size=32, **SIZES, **tokens)


def tiny_gpt2() -> Any:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=41, n_positions=16, **tokens)


def tiny_mixtral() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralConfig(**sizes, **SIZES)


def trained(config: Callable[[], Any], seed: int = 3) -> nn.Module:
    """Return a model whose parameters are all different from those of a new one."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config())
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    return model.eval()


def check_equal(model: nn.Module, theirs: nn.Module) -> None:
    assert not is_lazy(model)
    wanted = theirs.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)


@pytest.mark.unit
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    "others", [{}, {"cfg": None, "extra_state": {"epoch": 3}}, {"args": argparse.Namespace(arch="opt")}]
)
def test_an_opt_of_metaseq(tmp_path: Path, is_fused: bool, others: dict[str, Any]) -> None:
    theirs = trained(tiny_opt)
    path = tmp_path / "restored.pt"
    write_metaseq(theirs, path, is_fused=is_fused, has_projection=is_fused, **others)
    model = resolve_model(tiny_opt).build()
    assert is_lazy(model)
    assert load_values(model, path).is_clean
    check_equal(model, theirs)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.model.decoder.embed_positions.weight.shape == (18, 16)


@pytest.mark.unit
def test_the_fused_weight_is_key_value_query(tmp_path: Path) -> None:
    theirs = trained(tiny_opt)
    fused = metaseq_tensors(theirs, is_fused=True, has_projection=False)
    bias = fused["decoder.layers.1.self_attn.qkv_proj.bias"]
    attention = theirs.model.decoder.layers[1].self_attn
    assert torch.equal(bias[:16], attention.k_proj.bias)
    assert torch.equal(bias[32:], attention.q_proj.bias)


@pytest.mark.unit
def test_all_that_does_not_fit_is_in_one_error_and_nothing_is_overwritten(tmp_path: Path) -> None:
    tensors = metaseq_tensors(trained(tiny_opt), is_fused=True, has_projection=False)
    del tensors["decoder.layers.0.fc1.bias"], tensors["decoder.layer_norm.weight"]
    tensors["decoder.embed_tokens.weight"] = tensors["decoder.embed_tokens.weight"][:-1].clone()
    tensors["decoder.layers.1.self_attn.qkv_proj.bias"] = torch.zeros(47)
    tensors["decoder.layers.2.fc1.bias"] = torch.zeros(32)
    torch.save({"model": tensors}, tmp_path / "restored.pt")
    model = trained(tiny_opt, seed=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"restored.pt does not fit the model; nothing was loaded") as caught:
        load_values(model, tmp_path / "restored.pt")
    said = str(caught.value)
    for part in (
        "5 missing in the checkpoint",
        "model.decoder.layers.0.fc1.bias",
        "model.decoder.final_layer_norm.weight",
        *(f"model.decoder.layers.1.self_attn.{name}_proj.bias" for name in "kvq"),
        "2 unexpected in the checkpoint",
        "model.decoder.layers.1.self_attn.qkv_proj.bias",
        "model.decoder.layers.2.fc1.bias",
        "embed_tokens.weight: (40, 8) torch.float32 in the checkpoint, (41, 8) torch.float32 in the model",
    ):
        assert part in said, part
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.unit
def test_a_projection_of_its_own_does_not_fit_a_tied_head(tmp_path: Path) -> None:
    tensors = metaseq_tensors(trained(tiny_opt), is_fused=False, has_projection=True)
    tensors["decoder.output_projection.weight"] += 1
    torch.save(tensors, tmp_path / "restored.pt")
    with pytest.raises(ValueError, match="two different tensors in the checkpoint, one in the model"):
        load_values(resolve_model(tiny_opt).build(), tmp_path / "restored.pt")


class Runs:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.unit
def test_a_file_that_only_code_could_restore_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_metaseq(trained(tiny_opt), tmp_path / "restored.pt", cfg=Runs())
    with pytest.raises(ValueError, match=r"holds objects that only running code could restore.*mkdir"):
        load_values(resolve_model(tiny_opt).build(), tmp_path / "restored.pt")
    assert not (tmp_path / "ran").exists()


CONFIGS = [tiny_opt, tiny_bloom, tiny_neox, tiny_gpt2, tiny_mixtral]


@pytest.mark.unit
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "8KB"}])
def test_a_folder_of_transformers(tmp_path: Path, config: Callable[[], Any], options: dict[str, Any]) -> None:
    theirs = trained(config)
    theirs.save_pretrained(tmp_path, **options)
    assert ("max_shard_size" in options) == (tmp_path / "model.safetensors.index.json").is_file()
    model = resolve_model(tmp_path).build()
    load_values(model, tmp_path)
    check_equal(model, theirs)


@pytest.mark.unit
@pytest.mark.parametrize("config", [tiny_opt, tiny_bloom, tiny_gpt2])
def test_a_torch_file_of_the_model_without_its_head(tmp_path: Path, config: Callable[[], Any]) -> None:
    theirs = trained(config)
    values = theirs.base_model.state_dict()
    if config is tiny_gpt2:  # what older versions saved
        values["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    torch.save(values, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        model = resolve_model(config).build()
        load_values(model, path)
        check_equal(model, theirs)


@pytest.mark.unit
def test_values_are_converted_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    theirs = trained(tiny_bloom).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    model = resolve_model(tmp_path).build(dtype=torch.float32)
    assert load_values(model, tmp_path).is_clean
    check_equal(model, theirs.float())


@pytest.mark.unit
def test_what_this_package_saves(tmp_path: Path) -> None:
    theirs = trained(tiny_opt)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    save_model(theirs, tmp_path / "folder", shard=True, use_safetensors=True)
    save_model(theirs, tmp_path / "wrapped.pt", prefix="module.")
    save_model(theirs, tmp_path / "by_ranks", gather_dtensor=False)
    save_checkpoint(tmp_path / "epoch.pt", 3, theirs, optimizer)
    for name in ("folder", "wrapped.pt", "by_ranks", "epoch.pt"):
        model = resolve_model(tiny_opt).build()
        load_values(model, tmp_path / name)
        check_equal(model, theirs)


@pytest.mark.unit
def test_an_opened_checkpoint_says_what_is_there_and_loads_as_often_as_one_likes(tmp_path: Path) -> None:
    theirs = trained(tiny_opt)
    write_metaseq(theirs, tmp_path / "restored.pt", cfg=None)
    opened = open_checkpoint(tmp_path / "restored.pt")
    assert opened.source == str(tmp_path / "restored.pt")
    assert opened.tensors["decoder.embed_positions.weight"].shape == (18, 16)
    for _ in range(2):
        model = resolve_model(tiny_opt).build()
        load_values(model, opened)
        check_equal(model, theirs)
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "gone.pt")
    (tmp_path / "text.pt").write_text("weights")
    with pytest.raises(ValueError, match=r"text.pt is neither a torch file nor a safetensors file"):
        open_checkpoint(tmp_path / "text.pt")


def cut_over_ranks(config: Callable[[], Any], num_stages: int, path: str) -> None:
    """Each rank fills its slices of its stage, and gets memory for these only."""
    colossalai.launch_from_torch(
        {"parallel": {"tensor": {"size": 2, "mode": "1d"}, "pipeline": num_stages}}, verbose=False
    )
    theirs = trained(config)
    model = resolve_model(config).build()
    if num_stages > 1:
        sample = {"input_ids": torch.arange(12).reshape(2, 6)}
        model = cut_model(model, num_stages, [gpc.mesh.axis_rank("pp")], sample=sample)
    assert shard_model(model, gpc.mesh) > 0
    load_values(model, path)
    names = []
    for name, param in model.named_parameters():
        spec, whole = spec_of(param), theirs.get_parameter(name)
        assert torch.equal(param, whole if spec is None else spec.slice_of(whole)), name
        assert param.untyped_storage().nbytes() == param.nbytes, name
        names.append(name)
    assert len(names) == len(dict(theirs.named_parameters())) or num_stages > 1
    if num_stages == 1:
        ids = torch.arange(12).reshape(2, 6)
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "num_stages"),
    [further(tiny_opt, 2), (tiny_bloom, 1), further(tiny_neox, 1), (tiny_opt, 1), further(tiny_bloom, 2)],
)
def test_a_model_that_is_cut_over_ranks(tmp_path: Path, config: Callable[[], Any], num_stages: int) -> None:
    if config is tiny_opt:
        path = tmp_path / "restored.pt"
        write_metaseq(trained(config), path, is_fused=True, cfg=None)
    else:
        path = tmp_path / "saved"
        trained(config).save_pretrained(path)
    run_ranks(cut_over_ranks, 2 * num_stages, config, num_stages, str(path))


def misfits_on_ranks(path: str) -> str:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    model = resolve_model(tiny_opt).build()
    shard_model(model, gpc.mesh)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        load_values(model, path)
    gpc.destroy()
    return str(caught.value)


@pytest.mark.dist
def test_a_misfit_is_the_same_error_on_all_ranks_with_the_shapes_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "restored.pt"
    write_metaseq(trained(lambda: tiny_opt(vocab_size=40)), path)
    first, second = run_ranks(misfits_on_ranks, 2, str(path))
    assert first == second
    assert "(40, 8) torch.float32 in the checkpoint, (41, 8) torch.float32 in the model" in first
