"""Sequences that ranks share: dropout, precisions, logits, and what is refused.

That they train as in one process is in table.py, and what is sent in test_sent_bytes.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo import bert, gpt
from colossalai.nn.layer.sequence_parallel import own_positions
from tests.model_zoo.test_hugging_face import Recorded, hugging_face
from tests.model_zoo.tiny import VOCAB, build, criterion_of
from tests.parity.table import MODES
from tests.parity.tasks import RING, SEQ, RingNet, masked_batch, with_ring
from tests.parity.training import Run, in_float64, through_engine
from tests.ranks import run_ranks
from tests.turns import each_in_turn, run_each

pytestmark = pytest.mark.dist

BATCH = 4
BUILD = partial(build, max_position_embeddings=SEQ, vocab_parallel_limit=1)


def parallel_of(attention: str, size: int, mode: str | None = None) -> dict[str, Any]:
    """Return the config of ranks that share sequences, by an attention or in the mode "sequence"."""
    if attention == "mode":
        return {"parallel": {"tensor": {"size": size, "mode": "sequence"}}}
    sequence = {"size": size, "attention": attention}
    return {"parallel": {"sequence": sequence, **({"tensor": MODES[mode]} if mode else {})}}


def dropped(attention: str, size: int, mode: str | None = None) -> tuple[float, list[float]]:
    """Return a loss with dropped attention weights, and a mask of tokens once the model is assembled."""
    colossalai.launch_from_torch(parallel_of(attention, size, mode), verbose=False)
    torch.manual_seed(3)
    with in_float64():
        model, criterion = BUILD("gpt", attention_dropout=0.5), criterion_of("gpt")
    ids, mask, labels = masked_batch("gpt", 0)
    loss = criterion(model(ids, mask), labels).item()
    optimizer = torch.optim.SGD(model.parameters())
    colossalai.initialize(model, optimizer, criterion, verbose=False)
    return loss, nn.functional.dropout(torch.ones(64)).tolist()


def test_dropout_belongs_to_heads_and_tokens_wherever_they_are() -> None:
    (((expected, _),),) = run_each(1, dropped, [("ring", 1)])
    for found in run_each(4, dropped, [(attention, 2, "1d") for attention in ("ring", "ulysses")]):
        assert [loss for loss, _ in found] == pytest.approx([expected] * 4, rel=1e-12)
        masks = [mask for _, mask in found]
        assert masks[0] == masks[1] != masks[2] == masks[3]  # neighbours hold the same tokens
    ((first, second),) = run_each(2, dropped, [("mode", 2)])
    assert first[0] == pytest.approx(expected, rel=1e-12)
    assert first[1] != second[1]


def dropped_gradients(recompute: bool) -> tuple[list[float], dict[str, Any]]:
    config = {**parallel_of("mode", 2), "recompute": recompute}
    colossalai.launch_from_torch(config, verbose=False)
    task = replace(RING, place=partial(with_ring, dropout=0.5))
    torch.manual_seed(3)
    subject = through_engine(Run(task=task, num_ranks=2, config=config), RingNet())
    losses = [float(subject.step(batch)) for batch in RING.batches()]
    return losses, {name: grad.tolist() for name, grad in subject.gradients().items()}


def test_recomputation_draws_the_same_dropout() -> None:
    plain, recomputed = run_each(2, dropped_gradients, [(False,), (True,)])
    assert plain == recomputed
    assert plain[0][1] == plain[1][1]
    assert plain[0][0] != plain[1][0]


def losses_in(precision: AMP_TYPE | None, ranks: int, name: str) -> list[float]:
    """Return the losses of three steps in float32 on one rank, or in a precision on several."""
    scale = {"init_scale": 256.0} if precision == AMP_TYPE.TORCH else {}
    config = parallel_of("mode", ranks) | ({"fp16": {"mode": precision, **scale}} if precision else {})
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(3)
    model = BUILD(name, init_std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = colossalai.initialize(model, optimizer, criterion_of(name), verbose=False)
    losses = []
    for seed in range(3):
        ids, mask, labels = masked_batch(name, seed)
        engine.zero_grad()
        loss = engine.criterion(engine(ids, mask), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long  # on an axis of their own, in bfloat16: in test_pairs.py
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_mixed_precision_stays_near_float32(name: str) -> None:
    expected = run_ranks(losses_in, 1, None, 1, name)[0]
    tolerances = {AMP_TYPE.BF16: 0.03, AMP_TYPE.TORCH: 0.004}  # 8 bits, 11 bits
    of_ranks = run_ranks(each_in_turn, 2, losses_in, [(precision, 2, name) for precision in tolerances])
    for allowed, *losses in zip(tolerances.values(), *of_ranks, strict=True):
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(expected, abs=allowed)
        assert losses[0] != expected


def logits_of(theirs: Recorded, name: str, ids: Any, mask: Any, expected: torch.Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch(parallel_of("mode", 2), verbose=False)
    model = {"gpt": gpt, "bert": bert}[name].from_hugging_face(theirs).eval()
    order = "zigzag" if name == "gpt" else "contiguous"
    at = own_positions(ids.shape[1], gpc.mesh.axis("sp"), order=order)
    torch.testing.assert_close(model(ids, mask), expected[:, at], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_hugging_face_models_give_the_same_logits(name: str) -> None:
    sizes = {"n_positions" if name == "gpt" else "max_position_embeddings": SEQ}
    model = hugging_face(name, **sizes).double()
    ids, mask, _ = masked_batch(name, 0)
    expected = model(input_ids=ids, attention_mask=mask).logits.detach()
    theirs = Recorded(model.config.to_dict(), model.state_dict())
    run_ranks(logits_of, 2, theirs, name, ids, mask, expected)


def message_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the messages are what is returned
        attempt()
    return str(caught.value)


def refusals() -> list[str]:
    colossalai.launch_from_torch({}, verbose=False)
    found = [
        message_of(lambda options=options: HybridParallelPlugin(**options).configure())
        for options in (
            {"sequence_attention": "ulysses"},
            {"sp_size": 2, "tp_size": 2, "sequence_parallel": True},
            {"sp_size": 2, "sequence_attention": "star"},
            {"sp_size": 3},
        )
    ]
    HybridParallelPlugin(tp_size=2, sequence_parallel=True, sequence_attention="ulysses").configure()
    return [*found, message_of(lambda: BUILD("gpt", num_attention_heads=1))]


def test_what_cannot_be_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for messages in run_ranks(refusals, 2):
        for message, wanted in zip(
            messages,
            [
                "sequence_attention is 'ulysses', but no ranks share a sequence: pass sp_size",
                "sp_size is 2, and sequence_parallel=True lets the 2 ranks of tp_size share",
                "attention is 'star'; it must be one of 'ring', 'ulysses'",
                "2 processes, but data 1 x pipeline 1 x sequence 3 = 3",
                "each of the 2 ranks that share a sequence some of the 1 heads",
            ],
            strict=True,
        ):
            assert wanted in message
    assert "write sp_size=2 in the place of tp_size=2, sequence_parallel=True" in capfd.readouterr().out


def refusals_of_inputs() -> list[str]:
    colossalai.launch_from_torch(parallel_of("mode", 2), verbose=False)
    ids, _, labels = masked_batch("bert", 0)
    outside = ids.clone()
    outside[0, -1] = VOCAB  # in the part of one rank only
    decoder, encoder = BUILD("gpt"), BUILD("bert")
    logits = torch.zeros(BATCH, SEQ // 2, VOCAB)
    attempts: list[Callable[[], object]] = [
        lambda: decoder(ids[:, :6]),
        lambda: encoder(ids[:, :7]),
        lambda: decoder(outside),
        lambda: encoder(ids, token_type_ids=outside),
        lambda: criterion_of("bert")(logits, labels.clamp(min=VOCAB)),
        lambda: criterion_of("gpt")(logits[:, :-1], labels),
        lambda: build("vit"),
    ]
    return list(map(message_of, attempts))


def test_inputs_that_cannot_be_are_refused_on_all_ranks_before_anything_is_sent() -> None:
    first, second = run_ranks(refusals_of_inputs, 2)
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
