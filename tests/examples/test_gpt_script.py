"""The GPT example from end to end: finish, run again, get killed, resume, refuse."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from transformers import GPT2LMHeadModel

from colossalai.context._config import OVERRIDES_VARIABLE
from tests.examples.scripts import EXAMPLES, run_script
from tests.examples.test_text_data import TEXT
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist

CONFIG = Path(__file__).with_name("gpt_config.py")
END_S = 300.0  # from the death of a rank to the end of all; a collective would wait for half an hour
START_S = 90.0  # for importing torch on a busy machine


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text; tests share its cache of tokens and the undisturbed run."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def undisturbed(workplace: Path) -> Path:
    """The folder of a run from the first step to the last."""
    train(workplace, "undisturbed")
    return workplace / "undisturbed"


def arguments(workplace: Path, output: str, config: Path = CONFIG) -> list[str]:
    paths = {"config": config, "data": workplace / "text.txt", "cache": workplace / "cache"}
    named = [f"--{name}={path}" for name, path in paths.items()]
    return [*named, f"--output={workplace / output}"]


def train(workplace: Path, output: str, *more: str, config: Path = CONFIG, num_ranks: int = 2) -> None:
    run_ranks(run_script, num_ranks, "gpt/train.py", *arguments(workplace, output, config), *more)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read what a run recorded; the speed is no result."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key != "tokens_per_second"}
        for line in lines
    ]


def test_a_run_leaves_its_results(undisturbed: Path) -> None:
    records = metrics(undisturbed)
    losses = [record["loss"] for record in records if "loss" in record]
    validations = {
        record["step"]: record["validation_loss"] for record in records if "validation_loss" in record
    }
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 61))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert list(validations) == [25, 50, 60]
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (undisturbed / "sample.txt").read_text().startswith("def ")
    assert any((undisturbed / "tensorboard").iterdir())
    assert sorted(path.name for path in (undisturbed / "checkpoints").iterdir()) == [
        "step-00000045",
        "step-00000060",
    ]


def test_a_run_is_served_without_a_step_between(undisturbed: Path) -> None:
    """The folder of a run is one of transformers, and of ours."""
    from colossalai.inference import LLM, SamplingParams

    llm = LLM(undisturbed, kv_memory=2**24)
    found = llm.generate("def ", SamplingParams(max_tokens=None, temperature=0.8, seed=1, n=2))[0]
    assert {each.finish_reason for each in found.outputs} == {"length"}
    assert found.usage.total_tokens == 2 * llm.engine.limits.max_length - found.usage.prompt_tokens
    theirs = GPT2LMHeadModel.from_pretrained(undisturbed)
    given = torch.tensor([llm.tokenizer("def ")["input_ids"]])
    greedy = theirs.generate(given, max_new_tokens=4, do_sample=False)[0, given.shape[1] :].tolist()
    assert list(llm.generate("def ", SamplingParams(max_tokens=4, temperature=0))[0].token_ids) == greedy


def test_a_complete_run_is_not_trained_again(
    undisturbed: Path, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = metrics(undisturbed)
    train(workplace, "undisturbed")
    output = capfd.readouterr().out
    assert "resuming at step 60 of 60" in output
    assert f"validation loss  {before[-1]['validation_loss']:6.3f} nats" in output
    assert "unigram entropy" in output
    assert metrics(undisturbed) == before


@pytest.mark.long
def test_a_killed_run_resumes_to_the_losses_of_an_undisturbed_one(undisturbed: Path, workplace: Path) -> None:
    with launched(workplace, "killed") as launcher:
        wait_for_step(workplace / "killed", 20, launcher)
        kill_rank(launcher, 1)
        output, _ = launcher.communicate(timeout=END_S)
    assert launcher.returncode != 0
    assert "rank 1" in output
    assert "SIGKILL" in output
    assert metrics(workplace / "killed")[-1]["step"] < 60
    train(workplace, "killed")
    assert metrics(workplace / "killed") == metrics(undisturbed)


@pytest.mark.long
def test_a_hybrid_run_goes_on_where_a_data_parallel_one_stopped(undisturbed: Path, workplace: Path) -> None:
    folder = workplace / "hybrid"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000060")
    parallel = {"pipeline": {"size": 2, "partition": "balanced"}, "tensor": {"size": 2, "mode": "1d"}}
    config = changed_config(workplace, BATCH_SIZE=8, NUM_MICRO_BATCHES=4, parallel=parallel)
    train(workplace, "hybrid", config=config, num_ranks=4)
    wanted, found = metrics(undisturbed), metrics(folder)
    assert [record["step"] for record in found] == [record["step"] for record in wanted]
    # The same batches and the same weights at step 45; only the dropout masks are others.
    for mine, theirs in zip(found, wanted, strict=True):
        key = "loss" if "loss" in mine else "validation_loss"
        assert mine[key] == pytest.approx(theirs[key], rel=0.06)
        assert (mine[key] == theirs[key]) == (mine["step"] <= 45)


@pytest.mark.long
def test_fresh_starts_over(undisturbed: Path, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = workplace / "fresh"
    shutil.copytree(undisturbed, folder)
    (folder / "notes.txt").write_text("the user's own")
    train(workplace, "fresh", "--fresh")
    assert "starting at step 0 of 60" in capfd.readouterr().out
    assert metrics(folder) == metrics(undisturbed)
    assert (folder / "notes.txt").exists()


def test_a_checkpoint_of_another_training_is_refused(undisturbed: Path, workplace: Path) -> None:
    config = changed_config(workplace, HIDDEN_SIZE=32)
    with pytest.raises(RanksError, match=r"HIDDEN_SIZE was 16, is 32.*FRESH=1"):
        train(workplace, "undisturbed", config=config)


def test_a_loss_above_the_entropy_is_a_failure(undisturbed: Path, workplace: Path) -> None:
    """And `--fresh` begins from the first step in the folder of another run, with another config."""
    folder = workplace / "bad"
    shutil.copytree(undisturbed, folder)
    (folder / "notes.txt").write_text("the user's own")
    config = changed_config(workplace, TOTAL_STEPS=2, WARMUP_STEPS=1, LEARNING_RATE=0.0)
    with pytest.raises(RanksError, match="is not below the unigram entropy") as caught:
        train(workplace, "bad", "--fresh", config=config)
    assert "starting at step 0 of 2" in str(caught.value)
    assert [record["step"] for record in metrics(folder) if "loss" in record] == [1, 2]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert (folder / "notes.txt").exists()


def run_with_overrides(*words: str) -> None:
    with mock.patch.dict(os.environ, {OVERRIDES_VARIABLE: "TOTAL_STEPS=1 LEARNING_RATE=0.0"}):
        run_script(*words)


def test_values_of_the_command_line_go_before_those_of_the_config(workplace: Path) -> None:
    words = ("gpt/train.py", *arguments(workplace, "set"))
    with pytest.raises(RanksError, match="is not below the unigram entropy"):
        run_ranks(run_with_overrides, 2, *words)
    (record,) = [record for record in metrics(workplace / "set") if "loss" in record]
    assert (record["step"], record["lr"]) == (1, 0.0)


def test_too_little_text_for_a_batch_is_refused(workplace: Path) -> None:
    config = changed_config(workplace, BATCH_SIZE=1000)
    with pytest.raises(RanksError, match="do not fill a batch on every rank"):
        train(workplace, "short", config=config)


def changed_config(workplace: Path, **changes: Any) -> Path:
    path = workplace / "changed_config.py"
    path.write_text(CONFIG.read_text() + "".join(f"{key} = {value!r}\n" for key, value in changes.items()))
    return path


@contextmanager
def launched(workplace: Path, output: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run under the real launcher; whatever is left of it ends with the block."""
    script = str(EXAMPLES / "gpt" / "train.py")
    command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node=2", script]
    launcher = subprocess.Popen(
        [*command, *arguments(workplace, output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family = [psutil.Process(launcher.pid)]
    try:
        yield launcher
    finally:
        family += family[0].children(recursive=True) if family[0].is_running() else []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def wait_for_step(folder: Path, step: int, launcher: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_S
    while launcher.poll() is None and time.monotonic() < end:
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) >= step:
            return
        time.sleep(0.01)
    pytest.fail(f"the run did not come to step {step}: {launcher.communicate(timeout=1)[0]}")


def kill_rank(launcher: subprocess.Popen[str], rank: int) -> None:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank):
            process.send_signal(signal.SIGKILL)
            return
    pytest.fail(f"no process of rank {rank}")
