"""What a user may ask of a sharded model beyond a loss: attention weights, cross-attention, lazy building."""

import copy

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.communication import ledger
from colossalai.lazy import LazyInitContext, is_lazy
from colossalai.tensor import spec_of
from tests.launched import on_ranks
from tests.ranks import run_ranks
from tests.shardformer.models import VOCAB, InDouble, bert_decoder, gpt2, llama, t5, vit

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

CONFIG = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


@on_ranks(2, CONFIG)
def test_attention_weights_are_those_of_all_heads():
    """The weights of all heads, where they are asked for, and nothing sent for them where they are not."""
    torch.set_default_dtype(torch.float64)
    ids = torch.arange(6).repeat(3, 1)
    for build in (gpt2, llama, bert_decoder):
        model = build(attn_implementation="eager")
        context = {} if build is not bert_decoder else {"encoder_hidden_states": torch.randn(3, 4, 8)}
        twin = copy.deepcopy(model)
        shapes = []  # of a hook of the user, who has called the model with the option before
        block = model.bert.encoder.layer[0].attention.self if build is bert_decoder else None
        if block is None:
            block = model.transformer.h[0].attn if build is gpt2 else model.model.layers[0].self_attn
        block.register_forward_hook(lambda _, __, output, seen=shapes: seen.append(output[1].shape))
        model(ids, output_attentions=True, **context)
        engine, *_ = colossalai.initialize(model, verbose=False)
        with ledger() as silent:
            plain = engine(ids, **context)
        with ledger() as book:
            found = engine(ids, output_attentions=True, **context)
        wanted = twin(ids, output_attentions=True, **context)
        for kind in ("attentions", "cross_attentions") if context else ("attentions",):
            assert len(found[kind]) == len(wanted[kind]) == twin.config.num_hidden_layers
            for mine, theirs in zip(found[kind], wanted[kind], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)
        gathers = book.count("all_gather") - silent.count("all_gather")
        assert gathers == len(wanted.attentions) + len(wanted.get("cross_attentions") or ())
        assert plain.get("attentions") is None
        assert shapes[0] == shapes[2]


@on_ranks(2, CONFIG)
def test_attention_weights_of_other_kinds_of_models():
    """Those of an encoder and decoder, whose outputs have them behind a bias, and of images."""
    torch.set_default_dtype(torch.float64)
    ids = torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(1))
    images = torch.randn(3, 1, 6, 6)
    given_of = {t5: {"input_ids": ids, "decoder_input_ids": ids[:, :4]}, vit: {"pixel_values": images}}
    for build, given in given_of.items():
        model = build().model
        model.set_attn_implementation("eager")
        twin = copy.deepcopy(model)
        engine, *_ = colossalai.initialize(model, verbose=False)
        with InDouble():
            found, wanted = (each(**given, output_attentions=True) for each in (engine, twin))
        kinds = [kind for kind in wanted if kind.endswith("attentions")]
        assert len(kinds) == (3 if build is t5 else 1)
        for kind in kinds:
            for mine, theirs in zip(found[kind], wanted[kind], strict=True):
                assert mine.shape[1] == 4
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-12)


@on_ranks(2, CONFIG)
def test_a_lazily_built_model_is_materialized_as_slices():
    """A model that was built lazily is materialized as slices, with the values of an eager one."""
    torch.manual_seed(3)
    eager = gpt2()
    torch.manual_seed(3)
    with LazyInitContext():
        model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
    assert not is_lazy(model)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        spec, whole = spec_of(param), eager.get_parameter(name)
        assert torch.equal(param, whole if spec is None else spec.slice_of(whole)), name
        assert param.untyped_storage().nbytes() == param.nbytes, name
        assert id(param) in held
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.arange(6)[None]
    torch.testing.assert_close(engine(ids).logits, eager(ids).logits)


def lazy_stage():
    """A stage of a lazily built model is cut before it gets memory; what stages share is equal."""
    parallel = {**CONFIG["parallel"], "pipeline": {"size": 2, "partition": "balanced"}}
    colossalai.launch_from_torch({"parallel": parallel, "NUM_MICRO_BATCHES": 2}, verbose=False)
    torch.manual_seed(3)
    with LazyInitContext():
        model = gpt2()
    engine, *_ = colossalai.initialize(model, verbose=False)
    held = {name: param for name, param in engine.model.named_parameters() if spec_of(param) is not None}
    for name, param in held.items():
        assert param.untyped_storage().nbytes() == param.nbytes, name
    (shared,) = (param for name, param in held.items() if name.endswith(("wte.weight", "lm_head.weight")))
    values = shared.tolist()
    torch.distributed.barrier()  # rank 0 has the store, which the others may be making groups with
    return values


def test_a_lazily_built_stage_is_materialized_as_slices():
    first, second, third, fourth = run_ranks(lazy_stage, 4)
    assert first == third != second == fourth  # tensor-parallel neighbours are adjacent


def sequences():
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, sequence_parallel=True))
    with pytest.raises(
        ValueError, match=r"sequence parallelism cuts nothing of GPT2LMHeadModel: each of the 2"
    ):
        booster.boost(gpt2())
    booster.boost(nn.Linear(2, 2))


def test_sequence_parallelism_is_refused(capfd):
    run_ranks(sequences, 2)
    assert "sequence parallelism cuts nothing of Linear: each of the 2 ranks" in capfd.readouterr().out
