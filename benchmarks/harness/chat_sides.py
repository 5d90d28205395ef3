"""This package's side of `chat.py`: one run of a method, in a separate process."""

import time
from typing import Any

import torch
from chat_base import (
    LETTERS,
    MAX_NORM,
    MOST_NEW,
    SUMS,
    Job,
    Steps,
    letter_reward,
    random_texts,
    run_job,
    sums,
    tokenizer,
)
from transformers import AutoModelForCausalLM

import colossalai
from colossalai.booster import Booster
from colossalai.chat import DPO, GRPO, PPO, SFT, RolloutEngine, chat_data, with_value_head
from colossalai.cluster import free_port
from colossalai.inference import SamplingParams


def _launch(seed: int) -> Booster:
    colossalai.launch(
        {}, rank=0, world_size=1, host="127.0.0.1", port=free_port(), local_rank=0, seed=seed, verbose=False
    )
    torch.set_num_threads(1)
    return Booster()


def _model(job: Job) -> Any:
    return AutoModelForCausalLM.from_pretrained(job["base"], dtype=torch.float32)


def _adam(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)  # as TRL's by default


def _reward_arguments(job: Job) -> tuple[dict[str, Any], Any]:
    """Return the arguments of methods that learn from rewards, and the reward function."""
    if job["part"] in ("sums", "ppo"):
        rows = sums("train", num_train=job["num_train"], seed=job["seed"])
        if job["part"] == "ppo":
            rows *= 4  # so that a pass has a whole number of steps, with 64 prompts each
        given = {
            "tokenizer": tokenizer(SUMS),
            "sampling": SamplingParams(max_tokens=MOST_NEW),
        }
        return given | {"data": chat_data(rows, "prompts")}, _is_right
    rows = random_texts(["prompt"], job["prompts"] * 8, tuple(job["prompt_tokens"]), seed=job["seed"])
    least, most = job["new_tokens"]
    given = {
        "tokenizer": tokenizer(LETTERS),
        "sampling": SamplingParams(max_tokens=most, min_tokens=least),
    }
    return given | {"data": chat_data(rows, "prompts")}, _letters


def _is_right(prompt: str, answer: str, row: Any) -> float:
    return float(answer == row["answer"])


def _letters(prompt: str, answer: str, row: Any) -> float:
    return letter_reward(answer)


class _GenerationTimer:
    """Timer of the engine's generation and, with `compares`, of `generate` for the same prompts.

    Args:
        steps: Record of the times.
        model: Model whose parameters both read.
        compares: Whether `generate` runs as well; its time is excluded from the step.
    """

    def __init__(self, steps: Steps, model: Any, *, compares: bool) -> None:
        self.peer_ms: list[float] = []
        self.peer_tokens: list[int] = []
        self._steps, self._model, self._compares = steps, model, compares
        self._generate = RolloutEngine.generate

    def __enter__(self) -> "_GenerationTimer":
        def timed(engine: RolloutEngine, prompts: Any, params: Any) -> Any:
            started = time.process_time()
            found = self._generate(engine, prompts, params)
            ended = time.process_time()
            tokens = sum(len(each.token_ids) for group in found for each in group)
            self._steps.add_generation(ended - started, tokens)
            if self._compares:
                self._generate_with_transformers(prompts, params[0])
                self._steps.leave_out(time.process_time() - ended)
            return found

        RolloutEngine.generate = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        RolloutEngine.generate = self._generate  # type: ignore[method-assign]

    @torch.no_grad()
    def _generate_with_transformers(self, prompts: Any, params: SamplingParams) -> None:
        """Generate with transformers as TRL does: one batch with left padding, until the last answer ends."""
        length = max(len(each) for each in prompts)
        pad = self._model.config.pad_token_id
        rows = [[pad] * (length - len(each)) + list(each) for each in prompts]
        attended = [[0] * (length - len(each)) + [1] * len(each) for each in prompts]
        self._model.eval()
        started = time.process_time()
        found = self._model.generate(
            torch.tensor(rows).repeat_interleave(params.n, 0),
            attention_mask=torch.tensor(attended).repeat_interleave(params.n, 0),
            do_sample=True,
            top_k=0,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens,
        )
        self.peer_ms.append(1e3 * (time.process_time() - started))
        self.peer_tokens.append(int((found[:, length:] != pad).sum()))
        self._model.train()


def grpo(job: Job) -> Job:
    """Train on rewards: of sums, or of random letters."""
    booster, model = _launch(job["seed"]), _model(job)
    given, reward = _reward_arguments(job)
    steps = Steps(job)
    with _GenerationTimer(steps, model, compares=job["part"] == "generation") as generations:
        steps.start()
        GRPO(reward=reward, group_size=job["group"], max_length=64, normalize="sequence").fit(
            model,
            _adam(model, job["lr"]),
            booster=booster,
            **given,
            steps=job["steps"],
            max_norm=MAX_NORM,
            batch_size=job["prompts"],
            rows_at_once=job.get("rows") or job["prompts"] * job["group"],
            seed=job["seed"],
            on_step=lambda record: steps.end_step(model, record["reward"]),
        )
    return steps.figures(peer_ms=generations.peer_ms, peer_tokens=generations.peer_tokens)


def ppo(job: Job) -> Job:
    """Train on rewards of sums with a critic that is initialized with the layers of the base model."""
    booster, model = _launch(job["seed"]), _model(job)
    given, reward = _reward_arguments(job)
    critic = with_value_head(_model(job))
    steps = Steps(job)
    method = PPO(reward=reward, max_length=16, iterations=job["iterations"], kl_coef=0.0)
    seen: list[float] = []

    def note(record: Any) -> None:
        seen.extend([record["reward"]] if "reward" in record else [])  # in the first step on some answers
        if record["step"] % job["iterations"] == 0:  # the last update of these answers
            steps.end_step(model, seen[-1])

    with _GenerationTimer(steps, model, compares=False):
        steps.start()
        method.fit(
            model,
            _adam(model, job["lr"]),
            critic=critic,
            critic_optimizer=_adam(critic, job["lr"]),
            booster=booster,
            **given,
            steps=job["steps"] * job["iterations"],
            max_norm=MAX_NORM,
            batch_size=job["prompts"],
            rows_at_once=job["prompts"],
            seed=job["seed"],
            on_step=note,
        )
    return steps.figures()


def texts(job: Job) -> Job:
    """Train on texts, or on comparisons."""
    booster, model = _launch(job["seed"]), _model(job)
    length = (job["text_tokens"],) * 2
    is_sft = job["part"] == "sft"
    names = ["prompt", "completion"] if is_sft else ["prompt", "chosen", "rejected"]
    rows = random_texts(names, job["batch_size"] * job["steps"], length, seed=job["seed"])
    method = SFT() if is_sft else DPO(beta=0.1)
    data = method.encode(chat_data(rows, "sft" if is_sft else "preference"), tokenizer(LETTERS))
    steps = Steps(job)  # TRL's trainer encodes before it trains, too
    steps.start()
    method.fit(
        model,
        _adam(model, job["lr"]),
        booster=booster,
        data=data,
        tokenizer=tokenizer(LETTERS),
        steps=job["steps"],
        max_norm=MAX_NORM,
        batch_size=job["batch_size"],
        seed=job["seed"],
        on_step=lambda record: steps.end_step(model),
    )
    return steps.figures()


if __name__ == "__main__":
    run_job({"sums": grpo, "step": grpo, "generation": grpo, "ppo": ppo, "sft": texts, "dpo": texts}, __doc__)
