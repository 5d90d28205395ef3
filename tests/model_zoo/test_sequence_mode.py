"""GPT and BERT whose sequences are cut over ranks train as in one process, through both doors."""

import copy
from functools import partial

import pytest
import torch

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo import bert, gpt
from colossalai.nn.layer.sequence_parallel import own_positions
from colossalai.testing import ParityCase, Subject, check_parity, full_gradients, full_parameters
from tests.model_zoo.test_hugging_face import Recorded, hugging_face
from tests.model_zoo.tiny import VOCAB, build, criterion_of
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

pytestmark = pytest.mark.dist

SEQ, BATCH, MAX_NORM = 16, 4, 0.3
CONFIGS = {
    "ddp": {},
    "handler": {"gradient_handler": [{"type": "SequenceParallelGradientHandler"}]},
    "fsdp": {"zero": {"stage": 3}},
}
PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}
BUILD = partial(build, max_position_embeddings=SEQ, vocab_parallel_limit=1)


def make_batch(name, seed):
    """Return ids, mask and labels; as many labels count in each sample, but not on each rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
    lengths = torch.tensor([SEQ, SEQ - 5, SEQ - 1, SEQ // 2])
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    counts = torch.tensor([1, 2, 3, 5, 7])  # none of them in the last half
    labels = torch.full_like(ids, -100)
    labels[:, counts] = ids[:, counts]
    if name == "bert":
        ids = ids.index_fill(1, counts, 0)
    return ids, mask, labels


def loss_of(criterion, model, batch):
    ids, mask, labels = batch
    return criterion(model(ids, mask), labels)


def in_the_mode(apply, name, case, plain):
    """Build the model anew, now that there is a mode; it must start as the plain one, and is trained."""
    torch.manual_seed(case.seed)
    model = BUILD(name)
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    return apply(name, case, model)


def through_engine(name, case, model):
    optimizer = case.build_optimizer(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, criterion_of(name), verbose=False)

    def step(batch):
        total = 0.0
        for part in zip(*(tensor.chunk(engine.accumulation_steps) for tensor in batch), strict=True):
            engine.zero_grad()
            loss = loss_of(engine.criterion, engine, part)
            engine.backward(loss)
            engine.step()
            total += loss.item() / engine.accumulation_steps
        return total

    return subject(engine.model, step)


def through_booster(method, name, case, model):
    booster = Booster(plugin=PLUGINS[method]())
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion_of(name))

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(criterion, model, batch)
        booster.backward(loss, optimizer)
        if case.max_norm is not None:
            optimizer.clip_grad_by_norm(case.max_norm)
        optimizer.step()
        return loss.detach()

    return subject(model, step)


def subject(model, step):
    return Subject(
        step=step, gradients=lambda: full_gradients(model), parameters=lambda: full_parameters(model)
    )


def train(name, method, ranks, data, accumulation):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    plain, plain_criterion = BUILD(name), criterion_of(name)
    max_norm = (
        MAX_NORM if data > 1 else None
    )  # clipping hides gradients that are a multiple of the right ones
    config = {
        "parallel": {"tensor": {"size": ranks, "mode": "sequence"}},
        "clip_grad_norm": max_norm or 0.0,
        "gradient_accumulation": accumulation,
        **CONFIGS[method],
    }
    colossalai.launch_from_torch(config, verbose=False)
    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        # Keys have a bias whose gradient is 0 but for rounding: Adam divides that by eps.
        build_optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-6),
        compute_loss=partial(loss_of, plain_criterion),
        batches=[make_batch(name, seed) for seed in range(3)],
        max_norm=max_norm,
        seed=3,
    )
    slices = {"slice_index": gpc.mesh.axis_rank("dp"), "num_slices": data}
    losses = check_parity(case, partial(in_the_mode, through_engine, name, case), **slices)
    if method in PLUGINS and accumulation == 1:
        door = partial(through_booster, method)
        assert losses == check_parity(case, partial(in_the_mode, door, name, case), **slices)
    assert len(set(losses)) == 3


# Model, method, ranks that share a sequence, replicas, accumulation.
CELLS = [
    ("bert", "ddp", 2, 1, 1),
    further("gpt", "ddp", 4, 1, 1),
    ("bert", "handler", 2, 2, 1),
    further("gpt", "ddp", 2, 2, 2),
    further("gpt", "ddp", 2, 1, 1),
    further("bert", "ddp", 4, 1, 1),
    further("gpt", "ddp", 2, 2, 1),
    further("bert", "ddp", 2, 2, 1),
    further("gpt", "fsdp", 2, 2, 1),
]


@pytest.mark.parametrize(
    ("num_ranks", "cells"), grouped(CELLS, lambda name, method, ranks, data, accumulation: ranks * data)
)
def test_three_steps(num_ranks, cells):
    run_ranks(each_in_turn, num_ranks, train, cells)


def losses_in(precision, ranks, name):
    """Return the losses of three steps in float32 on one rank, or in a precision on several."""
    config = {"parallel": {"tensor": {"size": ranks, "mode": "sequence"}}}
    scale = {"init_scale": 256.0} if precision == AMP_TYPE.TORCH else {}
    config |= {"fp16": {"mode": precision, **scale}} if precision else {}
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(3)
    model = BUILD(name, init_std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = colossalai.initialize(model, optimizer, criterion_of(name), verbose=False)
    losses = []
    for seed in range(3):
        engine.zero_grad()
        loss = loss_of(engine.criterion, engine, make_batch(name, seed))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long  # on an axis of their own, in bfloat16: in tests/parity/test_pairs.py
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_mixed_precision_stays_near_float32(name):
    expected = run_ranks(losses_in, 1, None, 1, name)[0]
    tolerances = {AMP_TYPE.BF16: 0.03, AMP_TYPE.TORCH: 0.004}  # 8 bits, 11 bits
    of_ranks = run_ranks(each_in_turn, 2, losses_in, [(precision, 2, name) for precision in tolerances])
    for allowed, *losses in zip(tolerances.values(), *of_ranks, strict=True):
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(expected, abs=allowed)
        assert losses[0] != expected


def dropped(ranks):
    """Return whether tokens are dropped alike on the ranks, and a loss with dropped attention weights."""
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": ranks, "mode": "sequence"}}}, verbose=False)
    torch.manual_seed(3)
    model, criterion = BUILD("gpt", attention_dropout=0.5), criterion_of("gpt")
    ids, _, labels = make_batch("gpt", 0)
    loss = criterion(model(ids), labels).item()
    colossalai.initialize(model, torch.optim.SGD(model.parameters()), criterion, verbose=False)
    return loss, torch.nn.functional.dropout(torch.ones(64)).tolist()


def test_dropout():
    ((loss, _),), of_ranks = run_ranks(dropped, 1, 1), run_ranks(dropped, 2, 2)
    assert loss == pytest.approx(of_ranks[0][0], rel=1e-12)  # a weight's dropout belongs to its positions
    masks = [mask for _, mask in of_ranks]
    assert masks[0] != masks[1]  # other tokens


def refusals():
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, verbose=False)
    ids, _, labels = make_batch("bert", 0)
    outside = ids.clone()
    outside[0, -1] = VOCAB  # in the part of one rank only
    decoder, encoder = BUILD("gpt"), BUILD("bert")
    logits = torch.zeros(BATCH, SEQ // 2, VOCAB)
    attempts = [
        lambda: decoder(ids[:, :6]),
        lambda: encoder(ids[:, :7]),
        lambda: decoder(outside),
        lambda: encoder(ids, token_type_ids=outside),
        lambda: criterion_of("bert")(logits, labels.clamp(min=VOCAB)),
        lambda: criterion_of("gpt")(logits[:, :-1], labels),
        lambda: build("vit"),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are what is returned
            attempt()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_refused_on_all_ranks_before_anything_is_sent():
    first, second = run_ranks(refusals, 2)
    assert first == second
    for message, wanted in zip(
        first,
        [
            "a sequence of 6 positions over 2 ranks: zigzag order",
            "a sequence of 7 positions, which 2 ranks do not divide",
            "ids from 0 to 16; there are 16",
            "segments from 0 to 16; there are 2",
            "labels from 16 to 16; there are 16",
            "do not fit labels of shape (4, 16), of which this rank's part is (4, 8)",
            "a ViT has no mode 'sequence'",
        ],
        strict=True,
    ):
        assert wanted in message


def logits_of(theirs, name, ids, mask, expected):
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}, verbose=False)
    model = {"gpt": gpt, "bert": bert}[name].from_hugging_face(theirs).eval()
    order = "zigzag" if name == "gpt" else "contiguous"
    at = own_positions(ids.shape[1], gpc.mesh.axis("sp"), order=order)
    torch.testing.assert_close(model(ids, mask), expected[:, at], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_hugging_face_models_give_the_same_logits(name):
    model = hugging_face(
        name, **{"n_positions" if name == "gpt" else "max_position_embeddings": SEQ}
    ).double()
    ids, mask, _ = make_batch(name, 0)
    expected = model(input_ids=ids, attention_mask=mask).logits.detach()
    theirs = Recorded(model.config.to_dict(), model.state_dict())
    run_ranks(logits_of, 2, theirs, name, ids, mask, expected)
