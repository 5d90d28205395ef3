"""Models in memory whose owner uses them otherwise: threads, contexts, casts, compiled code."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from colossalai.inference import LLM, EngineOptions, SamplingParams
from tests.inference.models import greedy, prompts, tiny

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

PROMPTS = prompts(5, 60, 17)
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def made(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def plain(model: nn.Module) -> list[tuple[int, ...]]:
    return [greedy(model, prompt, 6) for prompt in PROMPTS]


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_that_share_an_llm_take_turns() -> None:
    model = tiny("Llama")
    llm, wanted, found = LLM(model, kv_memory=2**22), plain(model), []
    assert not in_threads(*[lambda: found.extend(made(llm) for _ in range(4))] * 2)
    assert found == [wanted] * 8


def test_threads_with_llms_of_one_model_do_not_disturb_each_other() -> None:
    model = tiny("Llama")
    llms, wanted, found = [LLM(model, kv_memory=2**22) for _ in range(2)], plain(model), []
    named = model.config._attn_implementation
    calls = [lambda llm=llm: found.extend(made(llm) for _ in range(4)) for llm in llms]
    assert not in_threads(*calls)
    assert found == [wanted] * 8
    assert model.config._attn_implementation == named


def test_autocast_of_the_caller_does_not_change_texts() -> None:
    model = tiny("Llama")
    wanted = plain(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(LLM(model, kv_memory=2**22)) == wanted


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_compiled_model_is_served_as_it_is(is_wrapped: bool) -> None:
    model = tiny("Llama")
    wanted = plain(model)
    if not is_wrapped:
        model.compile(backend="eager")
    given = torch.compile(model, backend="eager") if is_wrapped else model
    assert made(LLM(given, kv_memory=2**22)) == wanted


def test_other_tensors_in_the_place_of_parameters_are_noticed() -> None:
    model = tiny("Llama")
    llm = LLM(model, kv_memory=2**22)
    before = made(llm)
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()}, assign=True)
    after = made(llm)
    assert after == plain(model) != before
    torch.optim.SGD(model.parameters(), lr=0.5).zero_grad()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)  # of the new ones, in place
    assert made(llm) == plain(model) != after


def test_a_cast_model_is_refused() -> None:
    model = tiny("Llama")
    llm = LLM(model, kv_memory=2**22)
    model.double()
    with pytest.raises(ValueError, match=r"is now torch.float64 on cpu, and was torch.float32"):
        made(llm)
    assert made(LLM(model, kv_memory=2**22)) == plain(model)


def test_dropout_beside_attention_is_refused_in_training_mode() -> None:
    model = tiny("GPT2", attn_pdrop=0.0, resid_pdrop=0.1)
    llm, wanted = LLM(model, kv_memory=2**22), plain(model)
    model.train()
    with pytest.raises(ValueError, match=r"Dropout is in training mode .* call its eval\(\)"):
        made(llm)
    model.eval()
    assert made(llm) == wanted


@pytest.mark.parametrize("family", ["Glm4Moe", "HunYuanMoEV1"])
def test_models_with_odd_blocks_are_served_from_files(family: str) -> None:
    """Angles for half of a head's features; a router that reads the dtype of its layer's weight."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    sizes |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1} if family == "Glm4Moe" else {}
    sizes |= {"num_experts": 4, "moe_topk": 2} if family == "HunYuanMoEV1" else {}
    wanted = plain(tiny(family, **sizes))
    assert made(LLM(tiny(family, **sizes), kv_memory=2**22, is_owned=True)) == wanted


def test_the_window_ends_where_angles_of_all_positions_change() -> None:
    longer = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    longer |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    model = tiny("Llama", max_position_embeddings=256, rope_parameters=longer)
    llm = LLM(model, kv_memory=2**22)
    short = prompts(9, 50, 17)
    found = [output.token_ids for output in llm.generate(short, GREEDY)]
    assert found == [greedy(model, prompt, 6) for prompt in short]
    with pytest.raises(ValueError, match="64 of prompt and answer together"):
        llm.generate(prompts(70)[0], GREEDY)
    with pytest.raises(ValueError, match="the window of the model is 64 tokens"):
        LLM(model, kv_memory=2**22, max_length=128)


def test_a_model_whose_own_forward_fails_is_refused() -> None:
    model = tiny("Llama")
    model.lm_head = nn.Linear(31, 200)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be served: its (own )?forward fails"):
        LLM(model, kv_memory=2**22)


@pytest.mark.parametrize("wrong", [None, [None], [[1.5]], [True], [["a"]], {"a": 1}, torch.tensor(1.5)])
def test_what_is_no_prompt_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="token"):
        LLM(tiny("Llama"), kv_memory=2**22).generate(wrong, GREEDY)  # type: ignore[arg-type]


def test_prompts_may_be_tensors() -> None:
    llm = LLM(tiny("Llama"), kv_memory=2**22)
    wanted = llm.generate([1, 2], GREEDY)[0].token_ids
    for given in (torch.tensor([1, 2]), torch.tensor([[1, 2]]), (1, 2)):
        assert llm.generate(given, GREEDY)[0].token_ids == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"max_tokens": 2}, "x", [None]])
def test_params_of_another_kind_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be a SamplingParams"):
        LLM(tiny("Llama"), kv_memory=2**22).generate([1], wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"stop": 5}, {"stop_token_ids": None}, {"logit_bias": [1]}, {"ignore_eos": 1}, {"structure": ""}],
)
def test_fields_of_another_kind_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*; it must be"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


WRONG = {
    "block_size": (1.5, "16", True, 0),
    "max_running": (1.5,),
    "max_length": (2.5,),
    "kv_memory": ("4GiB", float("inf"), float("nan"), True, 0),
    "is_batch_invariant": ("no",),
    "adapters": ("folder", None),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, each in WRONG.items() for value in each])
def test_options_of_another_kind_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*; it must be"):
        EngineOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tp_size", "pp_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0])
def test_numbers_of_ranks_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*; it must be a whole number"):
        LLM(tiny("Llama"), **{name: value})  # type: ignore[arg-type]
