"""SFT, reward models and DPO train under every plan as they do in one process."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import DPO, SFT, RewardModeling, chat_data
from colossalai.core import global_context as gpc
from tests.chat.cells import TOLERANCE, assert_same, beside_one_process, without_times
from tests.chat.tiny import METHODS, PLUGINS, causal, model_for, rows_for, tokenizer
from tests.ranks import run_ranks
from tests.tiers import pairwise
from tests.turns import run_each

pytestmark = pytest.mark.dist

NUM_ROWS, BATCH = 13, 4  # the last batch is ragged, and no number of ranks divides the rows
MAX_NORM = 0.5  # some steps have more, some less


def train(name: str, plan: str, family: str) -> dict[str, Any]:
    """Train over two passes, two batches a step; return records, and what is measured before and after."""
    colossalai.launch_from_torch({}, verbose=False)
    method, data = METHODS[name], rows_for(name, NUM_ROWS)
    model: Any = model_for(name, family)
    booster = Booster(plugin=PLUGINS[plan]())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held_out: Any = rows_for(name, 7, split="test")
    size = BATCH // booster.mesh.axis_size("dp")
    options = {"booster": booster, "tokenizer": tokenizer()}
    model, optimizer, *_ = booster.boost(model, optimizer)
    if isinstance(method, DPO):
        held_out = method.with_reference(held_out, model, batch_size=size, **options)
    before = method.evaluate(model, data=held_out, batch_size=size, **options)
    result = method.fit(
        model, optimizer, data=data, epochs=2, batch_size=size, accumulation=2, max_norm=MAX_NORM, **options
    )
    after = method.evaluate(model, data=held_out, batch_size=size, **options)
    return {"records": without_times(result.records), "before": before, "after": after}


def check(cells: list[tuple[str, str, str]], num_ranks: int) -> None:
    """Compare all ranks with one process."""

    def is_left_out(place: int, key: str, other: Any) -> bool:
        # The reference itself has margins of zero, up to the rounding of products of other sizes.
        return key == "accuracy" and name in ("dpo", "ipo") and place in (0, 4)

    for cell, found, wanted in beside_one_process(
        train, cells, num_ranks, lambda name, plan, family: (name, "ddp", family)
    ):
        name = cell[0]
        assert len(found["records"]) == 4
        mine, theirs = ([*each["records"], each["before"], each["after"]] for each in (found, wanted))
        assert_same(mine, theirs, cell, is_left_out=is_left_out)
        assert found["records"][-1]["loss"] < 0.99 * found["records"][0]["loss"]


def test_on_two_ranks() -> None:
    cells = [("sft", "gemini", "llama"), ("reward", "zero 2", "opt")]
    check([*cells, ("dpo", "pp 2", "opt"), ("ipo", "tp 2", "gpt2")], 2)


@pytest.mark.long
def test_further_families_on_two_ranks() -> None:
    check([("reward", "tp 2", "opt"), ("dpo", "fsdp", "opt")], 2)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_further_plans_on_two_ranks(name: str) -> None:
    check([(name, plan, "llama") for plan in PLUGINS if plan != "tp 2, zero 1"], 2)


@pytest.mark.long
def test_on_four_ranks() -> None:
    cells = pairwise(list(METHODS), ("ddp", "pp 2", "tp 2, zero 1"), ("llama", "gpt2", "opt"))
    check(cells, 4)


def with_dropout(plan: str, family: str, name: str, disables: bool) -> list[dict[str, float]]:
    """Train a model whose config has dropout for two steps; return the records."""
    colossalai.launch_from_torch({}, verbose=False)
    model = model_for(name, family)
    numbers = 0
    for module in model.modules():
        for key in ("p", "dropout", "attention_dropout", "attn_pdrop"):
            if type(getattr(module, key, None)) is float:
                setattr(module, key, 0.5)
                numbers += 1
    method = METHODS[name] if disables else dataclasses.replace(METHODS[name], disable_dropout=False)
    booster = Booster(plugin=PLUGINS[plan]())
    result = method.fit(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        booster=booster,
        data=rows_for(name, NUM_ROWS),
        tokenizer=tokenizer(),
        steps=2,
        batch_size=BATCH // booster.mesh.axis_size("dp"),
    )
    raw = result.model.unwrap()
    kept = [module for module in raw.modules() for key in ("p", "dropout") if getattr(module, key, 0) == 0.5]
    assert numbers
    assert kept or plan == "pp 2"  # a stage has its own modules alone
    return without_times(result.records)


def test_dropout_is_off_in_comparisons() -> None:
    cells = [("dpo", "gpt2", "pp 2"), ("reward", "opt", "tp 2")]
    expected = run_each(1, with_dropout, [("ddp", family, name, True) for name, family, _ in cells])
    assert expected[0][0][0]["margin"] == pytest.approx(0.0, abs=1e-9)
    (((noisy, *_),),) = run_each(1, with_dropout, [("ddp", "gpt2", "dpo", False)])
    assert abs(noisy["margin"]) > 1e-6
    of_ranks = run_each(2, with_dropout, [(plan, family, name, True) for name, family, plan in cells])
    for found, (other,) in zip(of_ranks, expected, strict=True):
        for own in found:
            for record, wanted in zip(own, other, strict=True):
                assert record["loss"] == pytest.approx(wanted["loss"], rel=TOLERANCE)


def resume(folder: str) -> tuple[Any, Any]:
    """Train four steps at once; and two, then all four from the training state of the second."""
    results = []
    for name, times in (("whole", (4,)), ("parts", (2, 4))):
        for steps in times:
            colossalai.launch_from_torch({}, verbose=False)
            booster, model = Booster(plugin=PLUGINS["zero 2"]()), causal()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            where = f"{folder}/{name}"
            result = METHODS["dpo"].fit(
                model,
                optimizer,
                booster=booster,
                data=rows_for("dpo", NUM_ROWS),
                tokenizer=tokenizer(),
                steps=steps,
                batch_size=2,
                lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
                save=f"{where}/states",
                resume=f"{where}/states",
                save_every=1,
                log=f"{where}/log",
            )
            gpc.destroy()
        results.append(result.records)
    return tuple(results)


def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    whole, parts = run_ranks(resume, 2, str(tmp_path))[0]
    drop = [[{**each, "seconds": 0.0} for each in records] for records in (whole[2:], parts)]
    assert drop[0] == drop[1]
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "log/steps.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    }
    assert [each["loss"] for each in lines["whole"]] == [each["loss"] for each in lines["parts"]]
    assert [each["step"] for each in lines["parts"]] == [1, 2, 3, 4]
    assert (tmp_path / "parts/log/steps.png").stat().st_size > 1000


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain: Any = {"booster": Booster(), "tokenizer": tokenizer(), "data": rows_for("sft", 4)}
    before = [each.clone() for each in model.parameters()]
    for options, method, words in (
        ({}, SFT(), "steps=None and epochs=None: give one of them"),
        ({"steps": 1, "epochs": 1}, SFT(), "give one of them"),
        ({"steps": 1, "max_norm": 0.0}, SFT(), "max_norm=0.0: give a number above 0"),
        ({"steps": 0}, SFT(), "steps=0: give an integer of at least 1"),
        ({"steps": 1, "save_every": 2}, SFT(), "without a folder"),
        (
            {"steps": 1},
            RewardModeling(),
            "LlamaForCausalLM has no value head .*: give the result of with_value_head",
        ),
        ({"steps": 1}, DPO(), "learns from rows of stage 'preference'"),
        ({"steps": 1, "data": rows_for("dpo", 4)}, SFT(), "learns from rows of stage 'sft'"),
        ({"steps": 1, "booster": Booster(gradient_accumulation=2)}, SFT(), "pass accumulation=... to fit"),
    ):
        with pytest.raises(ValueError, match=words):
            method.fit(model, optimizer, **{**plain, **options})
    small = causal()
    small.config.vocab_size = 8
    for call in (SFT().fit, SFT().evaluate):
        more: dict[str, Any] = {"optimizer": optimizer, "steps": 1} if call.__name__ == "fit" else {}
        with pytest.raises(ValueError, match=r"have token \d+, and the model has 8 tokens"):
            call(model=small, **plain, **more)
        short = causal()
        short.config.max_position_embeddings = 5
        with pytest.raises(ValueError, match=r"text of \d+ tokens, and the model sees 5: give max_length=5"):
            call(model=short, **plain, **more)
    texts = chat_data([{"prompt": "3+4=" * 40, "chosen": "7", "rejected": "8"}])
    with pytest.raises(ValueError, match=r"the reference sees 5: give max_length=5 \(--max_len 5 of"):
        DPO().with_reference(texts, short, booster=Booster(), tokenizer=tokenizer())
    rows: Any = [{"prompt": "3+4=", "completion": "7"}]
    with pytest.raises(ValueError, match=r"data is of type list: give chat_data\(path or rows\)"):
        SFT().fit(model, optimizer, **{**plain, "data": rows, "steps": 1})
    with pytest.raises(TypeError, match=r"has no argument 'step': did you mean 'steps'\?"):
        SFT().fit(model, optimizer, **{**plain, "step": 1})
    with pytest.raises(ValueError, match=r"call with_reference\(data, model"):
        DPO().evaluate(model, **{**plain, "data": rows_for("dpo", 4)})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for make, words in (
        (lambda: SFT(max_length=1), "max_length=1"),
        (lambda: DPO(beta=0.0), "beta is 0.0"),
        (lambda: DPO(kind="other"), "kind is 'other'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=words):
            make()
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 1)


def lengths() -> str:
    """Measure rows of which one is too long and one is cut; return what is logged."""
    colossalai.launch_from_torch({}, verbose=False)
    rows = [("3+4=", "7"), ("what is 3+4? " * 4, "7"), ("3+4=", "7 " * 64)]
    data = chat_data([{"prompt": prompt, "completion": answer} for prompt, answer in rows])
    with redirect_stderr(StringIO()) as heard:
        given: dict[str, Any] = {"booster": Booster(), "tokenizer": tokenizer()}
        SFT(max_length=40).evaluate(causal(), data=data, **given)
    gpc.destroy()
    return heard.getvalue()


def test_what_is_too_long_is_told_once() -> None:
    first, second = run_ranks(lengths, 2)
    assert re.search(r"max_length=40: 1 of 3 rows are left out, .* lose \d+ tokens", first)
    assert first.count("max_length") == 1
    assert "max_length" not in second


def pad_beyond_the_vocabulary() -> list[Any]:
    """Train with a padding token that was added to the tokenizer alone, and without one."""
    colossalai.launch_from_torch({}, verbose=False)
    padded = copy.deepcopy(tokenizer())
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert padded.pad_token_id == causal().config.vocab_size
    found = []
    for each in (tokenizer(), padded):
        model = causal()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {"booster": Booster(), "tokenizer": each, "data": rows_for("sft", 8)}
        found.append(METHODS["sft"].fit(model, optimizer, steps=2, **given).records)
    gpc.destroy()
    return [[each["loss"] for each in records] for records in found]


def test_a_padding_token_that_the_model_does_not_know_is_not_read() -> None:
    plain, padded = run_ranks(pad_beyond_the_vocabulary, 1)[0]
    assert plain == padded


def torn_pairs() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = model_for("reward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pairs are not torn apart"):
        METHODS["reward"].fit(
            model,
            optimizer,
            booster=Booster(plugin=PLUGINS["pp 2"]()),
            data=rows_for("reward", 4),
            tokenizer=tokenizer(),
            steps=1,
            batch_size=3,
        )
    gpc.destroy()


def test_pairs_are_not_torn_by_microbatches() -> None:
    run_ranks(torn_pairs, 2)
