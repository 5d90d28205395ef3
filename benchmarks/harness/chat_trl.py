"""TRL's side of `chat.py`: one run of a trainer, in a separate environment."""

import time
from typing import Any

import torch
from chat_base import (
    LETTERS,
    MAX_NORM,
    MOST_NEW,
    SUMS,
    Job,
    Row,
    Steps,
    letter_reward,
    random_texts,
    run_job,
    sums,
    tokenizer,
)
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


class Note(TrainerCallback):  # type: ignore[misc]  # TRL is in an environment of its own
    """Callback that records each step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.prepared = 0.0  # seconds of the trainer's preparation that count

    def on_train_begin(self, *given: Any, **named: Any) -> None:
        """Begin the first step."""
        self._steps.start(prepared=self.prepared)

    def on_step_end(self, *given: Any, model: Any = None, **named: Any) -> None:
        """End a step."""
        self._steps.end_step(model)

    def on_log(self, *given: Any, logs: Any = None, **named: Any) -> None:
        """Store the reward."""
        if logs and "reward" in logs:
            self._steps.rewards.append(float(logs["reward"]))


def _model(job: Job) -> Any:
    return AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)


def _common(job: Job) -> dict[str, Any]:
    """Return the settings of all trainers: one thread, float32, a constant rate, no output files."""
    return {
        "output_dir": job["out"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "max_steps": job["steps"],
        "seed": job["seed"],
        "gradient_checkpointing": False,  # TRL's default is True: it would compute the forward twice
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def grpo(job: Job) -> Job:
    """Train on rewards: of sums, or of random letters."""
    is_sums = job["part"] == "sums"
    rows: list[Row]
    if is_sums:
        rows = sums("train", num_train=job["num_train"], seed=job["seed"])
    else:
        rows = random_texts(["prompt"], job["prompts"] * 8, tuple(job["prompt_tokens"]), seed=job["seed"])
    least, most = (None, MOST_NEW) if is_sums else job["new_tokens"]
    config = GRPOConfig(
        **_common(job),
        per_device_train_batch_size=job["prompts"] * job["group"],
        num_generations=job["group"],
        max_completion_length=most,
        generation_kwargs={} if least is None else {"min_new_tokens": least},
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
    )

    def reward(completions: list[str], **named: Any) -> list[float]:
        if not is_sums:
            return [letter_reward(each) for each in completions]
        return [float(each == wanted) for each, wanted in zip(completions, named["answer"], strict=True)]

    steps, model = Steps(job), _model(job)
    generate = model.generate

    def timed(*given: Any, **named: Any) -> Any:
        started = time.process_time()
        found = generate(*given, **named)
        prompt = named["input_ids"] if "input_ids" in named else given[0]
        new = found[:, prompt.shape[1] :]
        steps.add_generation(time.process_time() - started, int((new != model.config.pad_token_id).sum()))
        return found

    model.generate = timed
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(SUMS if is_sums else LETTERS),
        callbacks=[Note(steps)],
    )
    trainer.train()
    return steps.figures()


def sft(job: Job) -> Job:
    """Train on texts."""
    steps = Steps(job)
    length = (job["text_tokens"],) * 2
    rows = random_texts(["prompt", "completion"], job["batch_size"] * job["steps"], length, seed=job["seed"])
    trainer = SFTTrainer(
        model=_model(job),
        args=SFTConfig(**_common(job), per_device_train_batch_size=job["batch_size"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(LETTERS),
        callbacks=[Note(steps)],
    )
    trainer.train()
    return steps.figures()


def dpo(job: Job) -> Job:
    """Train on comparisons, with the reference computed before training or in each step."""
    steps = Steps(job)
    length = (job["text_tokens"],) * 2
    names = ["prompt", "chosen", "rejected"]
    rows = random_texts(names, job["batch_size"] * job["steps"], length, seed=job["seed"])
    config = DPOConfig(
        **_common(job),
        per_device_train_batch_size=job["batch_size"],
        precompute_ref_log_probs=job["refers_before"],
        beta=0.1,
    )
    note = Note(steps)

    class Timed(DPOTrainer):  # type: ignore[misc]
        """Trainer that records the time of the reference model."""

        def _precompute_ref_logps(self, *given: Any, **named: Any) -> Any:
            started = time.process_time()
            found = super()._precompute_ref_logps(*given, **named)
            note.prepared += time.process_time() - started
            return found

    trainer = Timed(
        model=_model(job),
        ref_model=None if job["refers_before"] else _model(job),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(LETTERS),
        callbacks=[note],
    )
    trainer.train()
    return steps.figures()


if __name__ == "__main__":
    run_job({"sums": grpo, "step": grpo, "generation": grpo, "sft": sft, "dpo": dpo}, __doc__)
