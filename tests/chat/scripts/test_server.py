"""The chat scripts that do not train: the server's options, an answer at the command line, drawn prompts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colossalai.chat import chat_data
from colossalai.chat.data import make_toy_data
from colossalai.inference import LLM, SamplingParams, alpaca_prompt
from colossalai.serving import ServeOptions
from tests.chat.tiny import causal, tokenizer
from tests.examples.scripts import EXAMPLES, example_module

pytestmark = pytest.mark.unit

SCRIPTS = EXAMPLES.parent / "applications" / "Chat"


def main_of(file: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script in this process; return its module's `main`'s result."""
    module = example_module(f"../applications/Chat/{file}")
    monkeypatch.setattr(sys, "argv", [file, *words])
    return module.main()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and its tokenizer, without a chat template."""
    made = tmp_path_factory.mktemp("tiny")
    causal().float().save_pretrained(made)
    tokenizer().save_pretrained(made)
    for name in ("chat_template.jinja",):
        (made / name).unlink()
    return made


def test_the_documented_options_are_those_of_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example_module("../applications/Chat/inference/server.py")
    asked: list[ServeOptions] = []
    monkeypatch.setattr(module, "serve", lambda options: asked.append(options) or 0)
    assert main_of("inference/server.py", "coati", monkeypatch=monkeypatch) == 0
    words = ("coati", "--quant", "8bit", "--http_host", "localhost", "--http_port", "7071")
    main_of("inference/server.py", *words, "--profanity_file", "words.txt", monkeypatch=monkeypatch)
    main_of("inference/server.py", "coati", "--quant", "4bit", monkeypatch=monkeypatch)
    loopback = {"host": "127.0.0.1", "port": 7070}
    assert asked == [
        ServeOptions(model="coati", server=loopback),
        ServeOptions(
            model="coati",
            profanity_file="words.txt",
            engine={"quantize": "int8"},
            server={"host": "localhost", "port": 7071},
        ),
        ServeOptions(model="coati", engine={"quantize": "int4"}, server=loopback),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("coati", "--quant", "2bit"), "invalid choice: '2bit'"),
        (("coati", "--http_host", "0.0.0.0"), "can be reached from other machines, and there is no api_key"),
        (("coati", "--profanity_file", "none.txt"), "the profanity file none.txt: No such file"),
        (("coati", "--http_port", "70000"), "port=70000; it must be from 0 to 65535"),
        (("nowhere",), "nowhere"),
        ((), "the following arguments are required: pretrained"),
    ],
)
def test_mistakes_are_told_before_anything_is_served(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main_of("inference/server.py", *words, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_one_answer_at_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folder), kv_memory=2**22)
    params = SamplingParams(max_tokens=5, temperature=0, top_k=50, top_p=0.95, stop=("\n### Instruction:",))
    words = ("--model_path", str(folder), "--model", "llama", "--input", "the river", "--max_length", "5")
    main_of("examples/inference.py", *words, "--temperature", "0", monkeypatch=monkeypatch)
    (expected,) = llm.generate([alpaca_prompt("the river")], params)
    assert capsys.readouterr().out == expected.text + "\n"
    main_of("examples/inference.py", *words, "--temperature", "0", "--raw", monkeypatch=monkeypatch)
    (expected,) = llm.generate(["the river"], params)
    assert capsys.readouterr().out == expected.text + "\n"
    told = []
    for _ in range(2):
        main_of("examples/inference.py", *words, "--seed", "3", monkeypatch=monkeypatch)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_adapters_answer_beside_their_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(str(tmp_path / "lora"))
    words = ("--model_path", str(tmp_path / "lora"), "--input", "the", "--raw", "--temperature", "0")
    main_of("examples/inference.py", *words, monkeypatch=monkeypatch)
    first = capsys.readouterr().out
    main_of("examples/inference.py", *words, "--pretrain", str(folder), monkeypatch=monkeypatch)
    assert capsys.readouterr().out == first
    plain = LLM(str(folder), kv_memory=2**22).generate(["the"], SamplingParams(max_tokens=100, temperature=0))
    assert first != plain[0].text + "\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "opt"), "--model opt, and .* has a model of llama"),
        (("--pretrain", "base"), "is a whole model; leave it out"),
        (("--max_length", "0"), "max_tokens=0"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--model_path", "nowhere"), "nowhere: there is no config.json in it"),
    ],
)
def test_mistakes_at_the_command_line(
    options: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--model_path", str(folder), "--input", "the", *options)
    with pytest.raises(SystemExit) as ended:
        main_of("examples/inference.py", *words, monkeypatch=monkeypatch)
    text = capsys.readouterr().err + str(ended.value)
    assert re.search(said, text), text


@pytest.mark.parametrize("kind", ["alpaca", "prompt", "messages"])
def test_prompts_are_drawn_without_their_answers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = make_toy_data("copy", 40, 0, language="zh")
    if kind == "alpaca":
        rows = [{"instruction": row["prompt"], "input": "x", "output": row["answer"]} for row in rows]
    if kind == "messages":
        rows = [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["answer"]},
                ],
                "level": 1,
            }
            for row in rows
        ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    made = tmp_path / "new" / "prompts.json"
    words = ("--dataset_path", str(tmp_path / "data.json"), "--save_path", str(made))
    drawn = []
    for options in (
        ("--sample_size", "8"),
        ("--sample_size", "8"),
        ("--sample_size", "8", "--seed", "1"),
        (),
    ):
        main_of("examples/generate_prompt_dataset.py", *words, *options, monkeypatch=monkeypatch)
        drawn.append(json.loads(made.read_text(encoding="utf-8")))
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(each) for each in drawn] == [8, 8, 8, 40]
    assert "8 of 40 prompts are in" in capsys.readouterr().out
    assert len(chat_data(made, "prompts")) == 40
    keys = {
        "alpaca": {"instruction", "input"},
        "prompt": {"prompt", "answer"},
        "messages": {"messages", "level"},
    }
    for number, row in enumerate(drawn[0]):
        assert set(row) == {"id", *keys[kind]}
        assert row["id"] == number
        assert kind != "messages" or [each["role"] for each in row["messages"]] == ["user"]


def test_a_file_of_other_rows_gives_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.json").write_text('[{"question": "a"}]')
    words = ("--dataset_path", str(tmp_path / "data.json"))
    for options, said in (((), "fit no format"), (("--sample_size", "0"), "give at least 1")):
        with pytest.raises(SystemExit):
            main_of("examples/generate_prompt_dataset.py", *words, *options, monkeypatch=monkeypatch)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_sft", "train_rm", "train_prompts"])
def test_a_shell_script_needs_a_model(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / "examples" / f"{script}.sh")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "PRETRAIN: give the folder of a model" in done.stderr
    assert not list(tmp_path.iterdir())
