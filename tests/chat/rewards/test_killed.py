"""A rank is killed in mid-run: the job ends, and the next one has the rewards of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from colossalai.chat.data import make_toy_data
from tests.chat.tiny import causal, tokenizer
from tests.examples.scripts import EXAMPLES, run_script
from tests.launcher.command import START_S, start, wait_until
from tests.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.long]

SCRIPT = EXAMPLES.parent / "applications" / "Chat" / "examples" / "train_grpo.py"
STEPS = 12


def options(folder: Path, base: Path) -> list[str]:
    """Return what the script is told, on two ranks."""
    words = (
        f"--pretrain {base}/base --dataset {base}/prompts.json --reward {base}/rewards.py:odd --model llama"
    )
    sizes = "--max_len 32 --max_new_tokens 6 --group_size 4 --batch_size 2 --max_epochs 2 --lr 1e-2"
    saves = f"--save_path {folder}/out --resume {folder}/states --save_interval 3 --async 1"
    return [*words.split(), *sizes.split(), *saves.split()]


def records(folder: Path) -> list[dict[str, float]]:
    file = folder / "out" / "log" / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if not key.startswith(("seconds", "tokens_per"))
        }
        for line in lines
    ]


def test_rewards_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    causal().float().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    rows = make_toy_data("sums", 2 * STEPS, 0, stage="prompts")
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    (tmp_path / "rewards.py").write_text(
        "def odd(prompt, answer, row):\n    return sum(map(ord, answer)) % 7 / 7\n"
    )
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    killed = start(folder, "run", "--nproc_per_node", "2", str(SCRIPT), *options(folder, tmp_path))
    try:
        wait_until(lambda: len(records(folder)) >= 4, START_S)
        ranks = [
            each
            for each in psutil.Process(killed.process.pid).children()
            if "train_grpo.py" in str(each.cmdline())
        ]
        ranks[1].kill()
        assert killed.wait() != 0
        assert "was killed by SIGKILL" in killed.err
    finally:
        killed.end()
    assert len(records(folder)) < STEPS
    for each in (folder, whole):
        run_ranks(run_script, 2, str(SCRIPT), *options(each, tmp_path))
    expected = records(whole)
    assert [each["step"] for each in expected] == list(range(1, STEPS + 1))
    assert len({each["reward"] for each in expected}) > 3
    assert records(folder) == expected
