"""Options of the training scripts that go on from another run, or name a part of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colossalai.booster.mixed_precision import mixed_precision_factory
from colossalai.chat.data import chat_data, make_toy_data, make_toy_tokenizer
from tests.chat.scripts.test_scripts import FOLDER, run_scripts
from tests.chat.tiny import causal, tokenizer
from tests.examples.scripts import example_module, run_script
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its tokenizer."""
    made = tmp_path_factory.mktemp("tiny")
    causal().float().save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("train_sft", ("--model_path", "{reward}"), "it has to be a language model, and is a reward model"),
        (
            "train_reward_model",
            ("--model_path", "{folder}"),
            "it has to be a reward model, and is a language",
        ),
        ("train_sft", ("--model_path", "{wide}"), "has hidden_size 64, and --pretrain .* has 32"),
        ("train_sft", ("--subset", "part"), r"rows\.json is a file: leave it out"),
        (
            "train_reward_model",
            ("--test", "True", "--max_datasets_size", "8"),
            "leave --max_datasets_size out",
        ),
        ("train_sft", ("--pretrain", "{adapters}"), "adapters of the model 'nowhere'"),
        ("train_prompts", ("--rm_path", "{reward}", "--rm_model", "opt"), "--rm_model opt, and .* of llama"),
        (
            "train_prompts",
            ("--rm_path", "{reward}", "--ptx_coef", "0.5"),
            "--ptx_coef without --pretrain_dataset",
        ),
        (
            "train_prompts",
            ("--rm_path", "{reward}", "--num_episodes", "1", "--max_timesteps", "4"),
            "there would be no update; give at most 4",
        ),
        (
            "train_prompts",
            ("--rm_path", "{toy}"),
            "has another tokenizer than --pretrain .*: give --rm_pretrain a causal",
        ),
        ("train_sft", ("--plugin", "TorchDDPPlugin()", "--strategy", "ddp"), "give one of them"),
        (
            "train_sft",
            ("--plugin", "GeminiPlugin(precision='bf16')", "--precision", "fp32"),
            "--precision fp32 is given too: leave one out",
        ),
        # The names are those of the options, not of the arguments of `fit`, and there is no traceback.
        ("train_dpo", ("--lr", "1e-3", "--beta", "-1"), "SystemExit: beta is -1.0"),
        (
            "train_sft",
            ("--max_len", "4", "--max_datasets_size", "1"),
            "SystemExit: --max_len 4: all 1 rows have longer",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    script: str, options: tuple[str, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    made = {name: tmp_path / name for name in ("reward", "wide", "toy")} | {"folder": folder}
    make_toy_tokenizer().save_pretrained(made["toy"])
    for name in ("reward", "wide", "toy"):
        config = json.loads((folder / "config.json").read_text())
        config |= (
            {"architectures": ["LlamaForSequenceClassification"]} if name != "wide" else {"hidden_size": 64}
        )
        made[name].mkdir(exist_ok=True)
        (made[name] / "config.json").write_text(json.dumps(config))
    made["adapters"] = tmp_path / "adapters"
    made["adapters"].mkdir()
    (made["adapters"] / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere"}')
    stage: Any = "sft" if script == "train_sft" else "preference"
    rows = make_toy_data("copy", 8, 0, stage="prompts" if script == "train_prompts" else stage)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    dataset = "--prompt_dataset" if script == "train_prompts" else "--dataset"
    words = ("--model", "auto", "--pretrain", str(folder), dataset, str(tmp_path / "rows.json"))
    given = tuple(word.format(**made) for word in options)
    with pytest.raises(RanksError, match=said):
        run_ranks(
            run_script, 1, f"{FOLDER}/{script}.py", *words, *given, "--save_path", str(tmp_path / "out")
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("call", "precision", "of_plugin", "of_booster"),
    [
        ("GeminiPlugin()", "bf16", "bf16", None),
        ("GeminiPlugin()", None, "fp32", None),
        ("LowLevelZeroPlugin(stage=1, precision='fp16')", None, "fp16", None),
        ("HybridParallelPlugin(tp_size=2, precision='bf16')", None, "bf16", None),
        ("HybridParallelPlugin(tp_size=2)", "fp16", "fp16", None),
        ("TorchFSDPPlugin()", None, None, "fp32"),
        ("TorchDDPPlugin()", "bf16", None, "bf16"),
    ],
)
def test_a_plugin_has_the_precision_that_was_asked_for(
    call: str, precision: str | None, of_plugin: str | None, of_booster: str | None
) -> None:
    options = example_module("../applications/Chat/examples/options.py")
    made, left = options.called(call, precision, "fp32")
    assert left == of_booster
    plan = made.plan(mixed_precision_factory(left or "fp32").precision())  # refuses a second precision
    name = {"bf16": "BF16", "fp16": "FP16", "fp32": "FullPrecision"}[of_plugin or of_booster or ""]
    assert name in type(plan.precision).__name__


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--log_interval", "0", "argument --log_interval: 0: give a number of at least 1"),
        ("--lora_rank", "-2", "argument --lora_rank: -2: give a number of at least 0"),
        ("--lr", "nan", "argument --lr: nan: give a number of at least 0.0"),
        ("--batch_size", "two", "argument --batch_size: invalid int value: 'two'"),
    ],
)
def test_numbers_out_of_range_are_told_under_their_option(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = example_module("../applications/Chat/examples/options.py")
    with pytest.raises(SystemExit):
        options.make_parser(None).parse_args(["--pretrain", "x", "--dataset", "y", option, value])
    assert said in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("script", ["train_sft", "train_reward_model"])
def test_a_run_goes_on_from_the_weights_of_another(script: str, folder: Path, tmp_path: Path) -> None:
    stage: Any = "sft" if script == "train_sft" else "preference"
    (tmp_path / "rows.json").write_text(json.dumps(make_toy_data("copy", 64, 0, stage=stage)))
    words = ("--model", "auto", "--pretrain", str(folder), "--dataset", str(tmp_path / "rows.json"))
    given = ("--strategy", "naive", "--max_epochs", "1", "--max_len", "64")
    further = {
        "first": ("--lr", "3e-3"),
        "second": ("--lr", "0", "--model_path", str(tmp_path / "first")),  # it stays as it was read
    }
    for name, options in further.items():
        out = ("--save_path", str(tmp_path / name))
        run_ranks(run_script, 1, f"{FOLDER}/{script}.py", *words, *given, *options, *out)
    base, first, second = (values_of(each) for each in (folder, *(tmp_path / name for name in further)))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], base[name]) for name in first.keys() & base.keys())


def test_a_run_begins_with_the_adapters_of_another(folder: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    (tmp_path / "rows.json").write_text(json.dumps(make_toy_data("copy", 16, 0)))
    (tmp_path / "pairs.json").write_text(json.dumps(make_toy_data("copy", 16, 0, stage="preference")))
    given = ("--model", "llama", "--strategy", "naive", "--max_epochs", "1", "--max_len", "64")
    commands = [
        (script, *given, "--dataset", str(tmp_path / data), "--pretrain", str(base), *options)
        for script, data, base, options in (
            ("train_sft", "rows.json", folder, ("--lora_rank", "2", "--lr", "0.1")),
            ("train_dpo", "pairs.json", tmp_path / "0", ("--lr", "0")),
            ("train_sft", "rows.json", tmp_path / "0", ("--lr", "0", "--lora_rank", "2")),
        )
    ]
    places = [("--save_path", str(tmp_path / str(number))) for number in range(len(commands))]
    run_ranks(run_scripts, 1, [(*words, *place) for words, place in zip(commands, places, strict=True)])
    opened: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "0")
    wanted = dict(opened.merge_and_unload().state_dict())
    assert any(not torch.equal(wanted[name], value) for name, value in values_of(folder).items())
    for name in ("1", "2"):  # adapters on what was added in are added in, too
        found = values_of(tmp_path / name)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("train_sft", "--log_interval"),
        ("train_reward_model", "--batch_size"),
        ("train_prompts", "--num_episodes"),
    ],
)
def test_counts_are_at_least_one(script: str, option: str) -> None:
    with pytest.raises(RanksError, match=f"argument {option}: 0: give a number of at least 1"):
        run_ranks(run_script, 1, f"{FOLDER}/{script}.py", option, "0")


def test_a_missing_peft_is_told_and_no_other_module() -> None:
    options = example_module("../applications/Chat/examples/options.py")
    with pytest.raises(SystemExit, match=r"adapters need peft: .*colossalai\[chat\]"), options.plain_errors():
        raise ModuleNotFoundError("No module named 'peft'", name="peft")
    with pytest.raises(ModuleNotFoundError), options.plain_errors():
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_prompts_of_a_table_are_those_of_the_column_with_values(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]
    row = {"prompt": None, "instruction": None, "messages": turns, "answer": "7"}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    words = ("--dataset_path", str(tmp_path / "rows.json"), "--save_path", str(tmp_path / "prompts.json"))
    run_ranks(run_script, 1, f"{FOLDER}/generate_prompt_dataset.py", *words)
    (found,) = chat_data(tmp_path / "prompts.json", "prompts")
    assert (found["messages"], found["answer"]) == (turns[:1], "7")


def values_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters in a folder."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
