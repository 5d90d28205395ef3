"""The documented /generate and /generate/stream: what is asked of the engine, and how it is answered."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from colossalai.inference import SamplingParams
from tests.serving.conftest import Site, wait_until
from tests.serving.fake import make_tokenizer
from tests.serving.test_errors import refused

pytestmark = pytest.mark.unit

ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)


def turn(instruction: str, response: str = "") -> dict[str, str]:
    return {"instruction": instruction, "response": response}


def events_of(text: str) -> list[tuple[str, Any]]:
    """Return names and data of server-sent events."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def asked(site: Site) -> str:
    """Return the prompt of the last request as text, special tokens included."""
    return str(site.service.tokenizer.decode(site.service.seen[-1].prompt_token_ids))


def test_a_dialogue_is_answered(site: Site) -> None:
    drawn = {"top_k": 50, "top_p": 0.5, "temperature": 0.7, "repetition_penalty": 1.2}
    history = [turn("the river", "it goes"), turn("and the sea")]
    answer = site.client.post("/generate", json={"history": history, "max_new_tokens": 6, **drawn})
    assert answer.status_code == 200
    (request,) = site.service.seen
    assert request.params == SamplingParams(max_tokens=6, **drawn)  # type: ignore[arg-type]
    assert asked(site) == "<|user|>the river<|assistant|>it goes<|user|>and the sea<|assistant|>"
    ids = site.service.answer_ids(request.prompt_token_ids, 6)
    assert answer.json() == {"response": site.service.tokenizer.decode(ids)}
    assert request.request_id.startswith("gen-")
    assert site.outcomes()["finished"] == 1


def test_a_stream_has_the_same_pieces(site: Site) -> None:
    body = {"history": [turn("the")], "max_new_tokens": 6}
    whole = site.client.post("/generate", json=body).json()["response"]
    answer = site.client.post("/generate/stream", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    assert [name for name, _ in events] == ["generate"] * (len(events) - 1) + ["end"]
    assert "".join(data for _, data in events[:-1]) == whole
    assert events[-1][1] == ""
    assert len(events) > 1


def test_a_model_without_a_chat_template_is_asked_as_it_was_trained(start: Any, tmp_path: Any) -> None:
    site = start(tokenizer=make_tokenizer(tmp_path, template=None), window=400)
    history = [turn("add", " it goes "), turn("and on")]
    site.client.post("/generate", json={"history": history[-1:], "max_new_tokens": 4})
    assert asked(site) == f"{ALPACA}\n\n### Instruction:\nand on\n\n### Response:"
    assert site.service.seen[0].params.stop == ("\n### Instruction:",)
    site.client.post("/generate", json={"history": history, "max_new_tokens": 4})
    assert asked(site) == (
        f"{ALPACA}\n\n### Instruction:\nadd\n\n### Response: it goes "
        "\n\n### Instruction:\nand on\n\n### Response:"
    )


def test_the_oldest_turns_make_room(site: Site) -> None:
    history = [turn(f"the river {number}", "goes on and on") for number in range(40)] + [turn("the sea")]
    for num_new in (8, 40, 43):
        answer = site.client.post("/generate", json={"history": history, "max_new_tokens": num_new})
        assert answer.status_code == 200
        request = site.service.seen[-1]
        assert request.params.max_tokens == num_new
        room = 64 - num_new - len(request.prompt_token_ids)
        assert room >= 0
        num_kept = asked(site).count("<|user|>") - 1
        assert asked(site).endswith("<|user|>the sea<|assistant|>")
        if num_kept:
            assert f"the river {40 - num_kept}<" in asked(site)
        longer = site.service.tokenizer.apply_chat_template(
            [
                {"role": role, "content": each[name]}
                for each in history[-num_kept - 2 :]
                for role, name in (("user", "instruction"), ("assistant", "response"))
            ][:-1],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert len(longer) > 64 - num_new  # one turn more would not have fit


def test_a_question_that_does_not_fit_is_told_what_would(site: Site) -> None:
    body = {"history": [turn("a", "b"), turn("the river " * 10)], "max_new_tokens": 60}
    status, error = refused(site.client.post("/generate", json=body))
    assert (status, error["param"], error["code"]) == (400, "history", "context_length_exceeded")
    num = int(error["message"].split("max_new_tokens=")[1].split()[0])
    assert site.service.seen == []
    assert site.client.post("/generate", json={**body, "max_new_tokens": num}).status_code == 200
    status, error = refused(site.client.post("/generate", json={"history": [turn("xyz " * 80)]}))
    assert status == 400
    assert "the window is 64 tokens, of which 32 are for the answer; shorten it by" in error["message"]
    assert "max_new_tokens=" not in error["message"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"history": []}, "history"),
    ({"history": [turn("")]}, "history[0].instruction"),
    ({"history": [turn("a", "b")]}, "history[0].response"),
    ({"history": [turn("a"), turn("b", "c")]}, "history[1].response"),
    ({"history": [{"response": ""}]}, "history[0].instruction"),
    ({"history": [{"instruction": "a", "input": "b"}]}, "history[0].input"),
    ({"history": "a"}, "history"),
    ({"history": [turn("\ud800")]}, "history[0]"),
    ({"history": [turn("a")], "max_new_tokens": 0}, "max_new_tokens"),
    ({"history": [turn("a")], "top_p": 2}, "top_p"),
    ({"history": [turn("a")], "top_k": -2}, "top_k"),
    ({"history": [turn("a")], "temperature": -1}, "temperature"),
    ({"history": [turn("a")], "repetition_penalty": 0}, "repetition_penalty"),
    ({"history": [turn("a")], "repetition_penalty": 1e-193}, "repetition_penalty"),
    ({"history": [turn("a")], "stream": True}, "stream"),
]


def test_wrong_bodies(site: Site) -> None:
    for body, param in WRONG:
        for path in ("/generate", "/generate/stream"):
            content = json.dumps(body)
            headers = {"content-type": "application/json"}
            status, error = refused(site.client.post(path, content=content, headers=headers))
            assert (status, error["param"]) == (400, param), body
        assert site.service.seen == [], body


def test_an_empty_history_is_told_in_plain_words(site: Site) -> None:
    _, error = refused(site.client.post("/generate", json={"history": []}))
    assert error["message"] == "history: it has 0 items; it must have at least 1"


def test_what_a_template_does_not_take(start: Any, tmp_path: Any) -> None:
    template = "{{ raise_exception('no talk') }}"
    site = start(tokenizer=make_tokenizer(tmp_path, template=template))
    status, error = refused(site.client.post("/generate", json={"history": [turn("a")]}))
    assert (status, error["param"]) == (400, "history")
    assert "no talk" in error["message"]
    site = start(tokenizer=None)
    status, error = refused(site.client.post("/generate", json={"history": [turn("a")]}))
    assert "this server has no tokenizer" in error["message"]


def test_key_queue_and_leaving_are_those_of_all_routes(start: Any) -> None:
    site = start(options={"api_key": "right"}, slots=1, max_queue=1)
    body = {"history": [turn("the")], "max_new_tokens": 30}
    for path in ("/generate", "/generate/stream"):
        answer = site.client.post(path, json=body, headers={"authorization": "Bearer wrong"})
        assert refused(answer)[0] == 401
    site.service.hold(2)
    with site.client.stream("POST", "/generate/stream", json=body) as reading:
        assert next(reading.iter_lines()) == "event: generate"
        waiting = threading.Thread(target=site.client.post, args=("/generate",), kwargs={"json": body})
        waiting.start()
        site.service.wait_for(lambda: site.service.num_queued == 1)
        status, error = refused(site.client.post("/generate", json=body))
        assert (status, error["code"]) == (429, "queue_full")
    site.service.wait_for(lambda: len(site.service.aborted) == 1)  # the reader has left
    site.service.release()
    waiting.join()
    wait_until(lambda: site.outcomes()["aborted"] == 1)
    assert site.outcomes()["finished"] == 1


def test_an_error_in_the_midst_is_the_last_event(start: Any) -> None:
    site = start()
    site.service.fail_at = 3
    body = {"history": [turn("the")], "max_new_tokens": 6}
    events = events_of(site.client.post("/generate/stream", json=body).text)
    assert [name for name, _ in events][-2:] == ["generate", "error"]
    assert events[-1][1]["error"]["message"] == "rank 1 has died"
    assert refused(site.client.post("/generate", json=body))[0] == 500
    assert site.outcomes()["failed"] == 2
