"""`colossalai memory --rlhf`: its bytes against models on the meta device, the table, the JSON, mistakes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from colossalai.chat import with_value_head
from colossalai.cli._main import main
from colossalai.cli._memory import _rlhf
from colossalai.cli._memory._rlhf import MODELS, OPT_FAMILY
from colossalai.context import Mesh
from colossalai.runtime.memory import STORAGE, RlhfSetup, plans_of, rlhf_memory, rlhf_numbers
from colossalai.shardformer import shard_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.unit

OPT = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
    "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048,
}  # fmt: skip
PARAMS = 1_315_758_080  # of facebook/opt-1.3b
HEAD = 2048


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """Have the command count each model once: that takes seconds, and the numbers depend on these alone."""
    found: dict[Any, Any] = {}

    def numbers(config: Any, **options: int) -> Any:
        key = type(config), config.to_json_string(use_diff=False), *sorted(options.items())
        if key not in found:
            found[key] = rlhf_numbers(config, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rlhf, "rlhf_numbers", numbers)
        yield


def invoke(*args):
    return CliRunner().invoke(main, ["memory", "--rlhf", *args], env={"COLUMNS": "80"})


def figures(*args):
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def plan_of(found, ranks, name, *, lora=False):
    (plan,) = [
        each for each in found["plans"] if (each["ranks"], each["name"], each["lora"]) == (ranks, name, lora)
    ]
    return plan


def rows_of(plan, model):
    return {row["name"]: row["num_bytes"] for row in plan["models"][model]["rows"]}


def opt(has_value_head=False):
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**OPT))
        return with_value_head(model) if has_value_head else model


def numel(model, *, trained=None):
    return sum(param.numel() for param in model.parameters() if trained in (None, param.requires_grad))


@pytest.fixture(scope="module")
def published():
    return figures("--memory", "80GiB")


def test_actor_and_critic_are_those_of_the_meta_device(published):
    assert numel(opt()) == PARAMS
    assert numel(opt(has_value_head=True)) == PARAMS + HEAD
    for ranks in (1, 4, 8):
        plan = plan_of(published, ranks, "DDP")
        for model, size in (("actor", PARAMS), ("critic", PARAMS + HEAD)):
            assert rows_of(plan, model) == {
                "parameters": 2 * size,
                "gradients": 2 * size,
                "gradients in float32": (2 if ranks == 1 else 4) * size,
                "master weights": 4 * size,
                "optimizer states": 8 * size,
            }
        assert plan["models"]["reference"]["bytes"] == 2 * PARAMS
        assert plan["models"]["reward"]["bytes"] == 2 * (PARAMS + HEAD)
        assert rows_of(plan, "rollouts") == {"keys and values": 2 * 2 * 24 * 2048 * 8 * (576 + 64)}


@pytest.mark.parametrize("ranks", [4, 8])
def test_zero_cuts_what_its_stage_says(published, ranks):
    """Section 5 of 1910.02054: 4 P + 12 P / N, 2 P + 14 P / N, 16 P / N."""
    share = PARAMS // ranks
    wanted = {"ZeRO-1": 4 * PARAMS + 12 * share, "ZeRO-2": 2 * PARAMS + 14 * share, "Gemini": 16 * share}
    for name, size in wanted.items():
        plan = plan_of(published, ranks, name)
        beside = rows_of(plan, "actor").get("gathered chunks", 0)
        assert plan["models"]["actor"]["bytes"] - beside == size, name
        assert (beside > 0) == (name == "Gemini")
    plan = plan_of(published, ranks, "Gemini")
    assert rows_of(plan, "reference")["frozen parameters"] == 2 * share
    assert rows_of(plan, "rollouts")["frozen parameters"] == 2 * PARAMS  # an engine's copy is whole
    on_host = plan_of(published, ranks, "ZeRO-2, host")["models"]["actor"]
    assert (on_host["bytes"], on_host["host_bytes"]) == (2 * PARAMS + 2 * share, 12 * share)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_hold_what_is_cut_for_them(tp):
    numbers = rlhf_numbers(transformers.OPTConfig(**OPT), tp=tp)
    for has_value_head, found in ((False, numbers.policy), (True, numbers.value)):
        model = opt(has_value_head)
        assert shard_model(model, Mesh({"tp": tp}, rank=0))
        assert found.total == numel(model)
    assert numbers.whole_policy == PARAMS


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_those_of_peft(tp):
    peft = pytest.importorskip("peft")
    numbers = rlhf_numbers(transformers.OPTConfig(**OPT), tp=tp, lora_rank=16)
    model = peft.get_peft_model(opt(), peft.LoraConfig(r=16, target_modules="all-linear"))
    if tp > 1:
        shard_model(model, Mesh({"tp": tp}, rank=0))
    assert numbers.policy.trained == numel(model, trained=True)
    assert numbers.policy.frozen == numel(model, trained=False)


def test_with_adapters_there_is_no_reference(published):
    plan = plan_of(published, 8, "ZeRO-1", lora=True)
    assert plan["models"]["reference"]["bytes"] == 0
    actor = rows_of(plan, "actor")
    assert actor["frozen parameters"] == 2 * PARAMS
    assert actor["parameters"] < 0.02 * 2 * PARAMS
    assert "frozen parameters" not in rows_of(plan, "rollouts")  # the engine reads the actor
    assert rows_of(plan_of(published, 8, "Gemini", lora=True), "rollouts")["frozen parameters"] == 2 * PARAMS


def test_what_fits_follows_from_the_memory(published):
    small = figures("--memory", "16GiB")
    for found, limit in ((published, 80), (small, 16)):
        for plan in found["plans"]:
            parts = plan["models"].values()
            assert plan["bytes"] == sum(part["bytes"] for part in parts)
            assert plan["bytes"] == sum(row["num_bytes"] for part in parts for row in part["rows"])
            assert plan["fits"] == (plan["bytes"] <= limit * 2**30)
    assert [plan["fits"] for plan in small["plans"]].count(True) < len(small["plans"])


def test_the_capacity_of_one_device(published):
    """The documents say 10.3 times; here by bytes, of published sizes."""
    capacity = published["capacity"]
    (plain, *_) = plans_of(1)
    numbers = {name: rlhf_numbers(OPT_FAMILY[name]()) for name in ("opt-1.3b", "opt-2.7b")}
    in_float32 = RlhfSetup(storage=STORAGE["fp32"])
    sizes = {name: rlhf_memory(each, in_float32, plain).num_bytes for name, each in numbers.items()}
    assert sizes["opt-1.3b"] <= 80 * 2**30 < sizes["opt-2.7b"]
    assert (capacity["torch_model"], capacity["torch_params"]) == ("opt-1.3b", PARAMS)
    assert capacity["best_model"] == "opt-13b"
    assert capacity["best_params"] / capacity["torch_params"] > 9


def test_the_table_fits_80_columns_and_has_the_bytes(published):
    result = invoke("--memory", "16GiB")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    rows = [line for line in lines if re.match(r"\s+[148] ", line)]
    assert max(map(len, rows)) <= 80
    assert len(rows) * 2 == len(published["plans"])
    (row,) = [line.split() for line in rows if line.split()[:2] == ["8", "ZeRO-2"] and "host" not in line]
    plan = plan_of(published, 8, "ZeRO-2")
    wanted = [plan["models"][name]["bytes"] for name in plan["models"]]
    wanted += [plan["bytes"], 0, plan_of(published, 8, "ZeRO-2", lora=True)["bytes"]]
    assert row[2:-1] == [f"{size / 2**30:.2f}" for size in wanted]
    fits = [each["fits"] for each in figures("--memory", "16GiB")["plans"]]
    words = {(True, True): "yes", (False, True): "LoRA", (False, False): "no"}
    assert [line.split()[-1] for line in rows] == [
        words[pair] for pair in zip(fits[::2], fits[1::2], strict=True)
    ]


def test_other_models_and_options(tmp_path):
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8, vocab_size=96,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = figures(
        "--model", str(tmp_path / "config.json"), "--precision", "fp32", "--batch", "3", "--seq", "100",
        "--lora-rank", "4", "--budget", "1GiB",
    )  # fmt: skip
    with torch.device("meta"):
        size = numel(transformers.LlamaForCausalLM(config))
    plan = plan_of(found, 4, "ZeRO-1")
    assert rows_of(plan, "actor") == {
        "parameters": 4 * size, "gradients": 4 * size, "optimizer states": 8 * size // 4,
    }  # fmt: skip
    assert rows_of(plan, "rollouts") == {"keys and values": 4 * 2 * 2 * 3 * 8 * 3 * (100 + 64)}
    assert not [each for each in found["plans"] if each["tp"] > 1]  # 3 heads of keys and values
    assert invoke("--model", "gpt2-small", "--memory", "8GiB").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "bert-base"), f"for --rlhf: choose one of {', '.join(MODELS)}"),
        (("--model", "nosuch.json"), "there is no file 'nosuch.json'"),
        (("--precision", "int8"), "--precision int8: choose one of fp32"),
        (("--seq", "4096"), "--seq 4096: opt-1.3b takes at most 2048"),
        (("--zero", "1"), "--zero has no meaning with --rlhf"),
        (("--trace", "a.png"), "--trace has no meaning with --rlhf"),
        (("--memory", "much"), "--memory much: give bytes"),
        (("--json", "--explain"), "leave --explain out"),
        (("--lora-rank", "0"), "0 is not in the range"),
        (("--serve", "opt_125M"), "--rlhf is about training: leave it out with --serve"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args, message):
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_its_options_are_of_no_use_elsewhere():
    for option, message in (("--lora-rank", "of --rlhf"), ("--memory", "of --serve MODEL or --rlhf")):
        result = CliRunner().invoke(main, ["memory", "--model", "gpt3", option, "8"])
        assert result.exit_code == 2
        assert f"{option} is an option {message}" in " ".join(result.output.split())


def test_the_help_has_an_example():
    assert "colossalai memory --rlhf --memory 80GiB" in invoke("--help").output


def test_the_formulas_give_the_bytes():
    result = invoke("--explain", "--memory", "80GiB", "--model", "opt-125m")
    lines = re.findall(r"^  \w+: [\w ]+ = (.*) = ([\d,]+) B$", result.output, re.MULTILINE)
    assert len(lines) > 100
    for numbers, size in lines:
        assert eval(numbers) == pytest.approx(int(size.replace(",", "")), abs=1)


PAGES = [Path(__file__).parents[2] / "docs/chat" / name for name in ("memory.md", "memory.zh.md")]
COMMANDS = re.compile(
    r"^```sh\n(colossalai memory .*?)^```\n(?:\n[^`]*?```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_the_page_print_what_it_says(page):
    blocks = COMMANDS.findall(page.read_text())
    assert len(blocks) >= 2
    for commands, output in blocks:
        for command in commands.splitlines():
            _, name, first, *args = command.split()
            assert (name, first) == ("memory", "--rlhf")
            result = invoke(*args)
            assert result.exit_code == 0, result.output
            printed = [line.rstrip() for line in result.output.splitlines()]
            wanted = [line for line in output.splitlines() if line]
            assert [line for line in printed if line in wanted] == wanted
