"""`inject_fastnn`: an ESMFold of transformers with axial layers in its trunk has the same outputs."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import EsmConfig, EsmForProteinFolding

from colossalai.model_zoo.evoformer import FoldingBlock, inject_fastnn, remove_fastnn

pytestmark = pytest.mark.unit


def esmfold(num_blocks: int = 2, dropout: float = 0.0) -> EsmForProteinFolding:
    """Return a small model in float64, with random values for layers that begin with an output of 0."""
    trunk = {
        "num_blocks": num_blocks,
        "sequence_state_dim": 16,
        "pairwise_state_dim": 12,
        "sequence_head_width": 4,
        "pairwise_head_width": 4,
        "position_bins": 4,
        "dropout": dropout,
        "max_recycles": 2,
        "chunk_size": None,
        "structure_module": {
            **{"sequence_dim": 16, "pairwise_dim": 12, "ipa_dim": 4, "resnet_dim": 8},
            **{"num_heads_ipa": 2, "num_qk_points": 2, "num_v_points": 2, "num_blocks": 2},
        },
    }
    config = EsmConfig(
        vocab_size=33,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        pad_token_id=1,
        mask_token_id=32,
        position_embedding_type="rotary",
        is_folding_model=True,
        esmfold_config={"trunk": trunk, "fp16_esm": False},
    )
    torch.manual_seed(0)
    model = EsmForProteinFolding(config).double().eval()
    for param in model.trunk.blocks.parameters():
        nn.init.normal_(param, std=0.3)
    return model


def features(length: int = 7) -> dict[str, Tensor]:
    """Return two proteins; the second is two residues shorter."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": torch.randint(0, 20, (2, length), generator=generator), "attention_mask": mask}


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def output_of_residues(model: EsmForProteinFolding) -> dict[str, Tensor]:
    """Return the outputs of residues, and of pairs of them, that exist."""
    output = model(**features())
    exists = features()["attention_mask"].bool()
    pairs = exists.unsqueeze(1) & exists.unsqueeze(2)
    return {
        **{name: output[name][exists] for name in ("s_s", "plddt")},
        **{name: output[name][pairs] for name in ("s_z", "distogram_logits")},
        "ptm": output["ptm"],
        "positions": output["positions"][:, exists],
    }


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_outputs_and_gradients_are_those_of_transformers(chunk_size: int | None) -> None:
    model = esmfold()
    twin = copy.deepcopy(model)
    assert inject_fastnn(model) is model
    assert all(isinstance(block, FoldingBlock) for block in model.trunk.blocks)
    outputs = []
    for each in (model, twin):
        each.trunk.set_chunk_size(chunk_size)
        outputs.append(output_of_residues(each))
        (outputs[-1]["s_s"].sum() + outputs[-1]["s_z"].square().sum()).backward()
    for name, output in outputs[0].items():
        check(output, outputs[1][name])
    for own, theirs in zip(model.trunk.blocks, twin.trunk.blocks, strict=True):
        attention = own.sequence_attention.attention
        grads = [
            getattr(attention, name).weight.grad.unflatten(0, (4, 4)) for name in ("query", "key", "value")
        ]
        check(torch.stack(grads, 1).flatten(0, 2), theirs.seq_attention.proj.weight.grad)
        restored = own.to_transformers()
        for name, param in theirs.named_parameters():
            if name != "seq_attention.proj.weight":
                check(restored.get_parameter(name).grad, param.grad)


def test_blocks_of_transformers_return() -> None:
    """Values, order, devices, dtypes, modes and frozen parameters are kept in both directions."""
    model = esmfold().train()
    blocks = model.trunk.blocks
    blocks[0].requires_grad_(False)
    blocks[1].tri_mul_in.bfloat16()
    wanted = copy.deepcopy(model.state_dict())
    flags = [param.requires_grad for param in model.parameters()]
    blocks[1].eval()
    inject_fastnn(model)
    assert not any(param.requires_grad for param in blocks[0].parameters())
    assert all(param.requires_grad for param in blocks[1].parameters())
    assert blocks[1].incoming.left.weight.dtype == torch.bfloat16
    assert [block.training for block in blocks] == [True, False]
    assert remove_fastnn(model) is model
    assert [*wanted] == [*model.state_dict()]
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert [param.requires_grad for param in model.parameters()] == flags
    assert [block.training for block in blocks] == [True, False]


def test_adapters_are_merged_before() -> None:
    """All linear layers are called, so adapters have an effect, and none is lost in `remove_fastnn`."""
    from peft import LoraConfig, inject_adapter_in_model

    model = inject_fastnn(esmfold())
    block = model.trunk.blocks[0]
    called: list[nn.Module] = []
    leaves = [module for module in block.modules() if not [*module.children()]]
    for module in leaves:
        module.register_forward_hook(lambda module, args, output: called.append(module))
    model(**features(), num_recycles=0)
    assert {*called} == {*leaves}

    inject_adapter_in_model(LoraConfig(target_modules=["query", "value"]), model)
    with pytest.raises(
        ValueError, match=r"has changed since inject_fastnn in .* more: merge adapters before"
    ):
        remove_fastnn(model)
    assert all(isinstance(block, FoldingBlock) for block in model.trunk.blocks)


def test_chunks_of_triangle_attention() -> None:
    """Both triangle attentions compute as many residues at a time."""
    model = inject_fastnn(esmfold(num_blocks=1))
    sizes: list[int] = []
    for layer in (model.trunk.blocks[0].starting, model.trunk.blocks[0].ending):
        layer.attention.register_forward_hook(lambda module, args, output: sizes.append(args[0].shape[1]))
    model.trunk.set_chunk_size(3)
    model(**features(), num_recycles=0)
    assert sizes == 2 * [3, 3, 1]


def test_a_projection_is_trained_if_a_part_of_it_was() -> None:
    model = inject_fastnn(esmfold(num_blocks=1))
    attention = model.trunk.blocks[0].sequence_attention.attention
    attention.query.requires_grad_(False)
    assert remove_fastnn(model).trunk.blocks[0].seq_attention.proj.weight.requires_grad


def test_shared_blocks_stay_shared() -> None:
    model = esmfold()
    model.trunk.blocks[1] = model.trunk.blocks[0]
    inject_fastnn(model)
    assert model.trunk.blocks[1] is model.trunk.blocks[0]


def test_dropout_has_the_same_distribution() -> None:
    """The seeds give the same masks, since layers draw in the same order."""
    model = esmfold(dropout=0.2).train()
    twin = copy.deepcopy(model)
    inject_fastnn(model)
    found = []
    for each in (model, twin):
        sequence, pair = (torch.ones(*shape, dtype=torch.float64) for shape in ((1, 5, 16), (1, 5, 5, 12)))
        torch.manual_seed(1)
        found.append(each.trunk.blocks[0](sequence, pair))
    for own, theirs in zip(*found, strict=True):
        check(own, theirs)


def test_a_row_without_residues_is_finite() -> None:
    block = inject_fastnn(esmfold()).trunk.blocks[0]
    sequence, pair = torch.zeros(1, 5, 16, dtype=torch.float64), torch.zeros(1, 5, 5, 12, dtype=torch.float64)
    assert all(x.isfinite().all() for x in block(sequence, pair, torch.zeros(1, 5)))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no EsmFoldTriangularSelfAttentionBlock"):
        inject_fastnn(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Linear has no FoldingBlock"):
        remove_fastnn(nn.Linear(2, 2))
    model = esmfold()
    model.trunk.blocks[1].tri_mul_in.linear_z.register_parameter("lora_a", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"differs from ESMFold's in tri_mul_in\.linear_z\.lora_a"):
        inject_fastnn(model)
    assert not any(isinstance(block, FoldingBlock) for block in model.trunk.blocks)
