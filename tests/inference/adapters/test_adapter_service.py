"""Adapters over HTTP: `colossalai serve --lora`, the list of models, and usage errors."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from colossalai.cli import main
from colossalai.inference import LLM, Request, SamplingParams
from colossalai.serving.command._serve import AdaptedModel
from tests.inference.adapters.made import save_adapter
from tests.serving.served_folder import save_tiny, serve_folder
from tests.tiers import in_soak

pytest.importorskip("peft")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.unit
CONFIGS: dict[str, dict[str, Any]] = {
    "sql": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
    "a/chat": {"r": 2, "lora_alpha": 8, "use_rslora": True, "target_modules": ["gate_proj", "o_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("served")
    save_tiny(folder / "tiny")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
        save_adapter(folder / name, model, seed, **config)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, in_soak(2)])
def test_requests_choose_an_adapter_by_model(folder: Path, tmp_path: Path, num_ranks: int) -> None:
    llm = LLM(folder / "tiny", adapters={name: folder / name for name in CONFIGS}, kv_memory=2**22)
    params = SamplingParams(max_tokens=24, temperature=0)
    expected = {name: llm.generate("the quick", params, adapter=name)[0].text for name in (None, *CONFIGS)}
    assert len(set(expected.values())) == 3
    config = tmp_path / "config.py"
    config.write_text(f"model_class = {str(folder / 'tiny')!r}\ncache_size = 50\ncache_list_size = 1\n")
    words = [word for name in CONFIGS for word in ("--lora", f"{name}={folder / name}")]
    served = serve_folder(
        tmp_path,
        "--config",
        str(config),
        "--name",
        "tiny",
        "--tp",
        str(num_ranks),
        "--port",
        "0",
        "--kv-memory",
        "32MiB",
        *words,
    )
    try:
        served.wait_until_ready()
        cards = served.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("sql", "tiny"),
            ("a/chat", "tiny"),
        ]
        for _ in range(2):  # the second time from the kept answers
            for name, text in expected.items():
                assert served.text(**({} if name is None else {"model": name})) == text
        unknown = served.post("/v1/completions", prompt="the quick", model="poet")
        assert unknown.status_code == 404
        assert "known ones are 'tiny', 'sql', 'a/chat'" in unknown.json()["error"]["message"]
        metrics = served.get("/metrics").text
        assert 'model="sql"' in metrics
        hits = [
            line for line in metrics.splitlines() if line.startswith("colossalai_answer_cache_hits_total")
        ]
        assert sum(float(line.rpartition(" ")[2]) for line in hits) == 3
    finally:
        assert served.end() == 0


@pytest.mark.long
def test_a_folder_of_adapters_is_served_as_a_model(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder / "tiny", adapters={name: folder / name for name in CONFIGS}, kv_memory=2**22)
    params = SamplingParams(max_tokens=24, temperature=0)
    expected = {name: llm.generate("the quick", params, adapter=name)[0].text for name in CONFIGS}
    lora = ("--lora", f"a/chat={folder / 'a/chat'}", "--tokenizer", str(folder / "tiny"))
    served = serve_folder(tmp_path, str(folder / "sql"), "--port", "0", "--kv-memory", "32MiB", *lora)
    try:
        served.wait_until_ready()
        cards = served.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("sql", None), ("a/chat", "sql")]
        assert served.text() == served.text(model="sql") == expected["sql"]
        assert served.text(model="a/chat") == expected["a/chat"]
    finally:
        assert served.end() == 0


def test_an_adapted_model_answers_with_its_adapter() -> None:
    service = RecordingService()
    front = AdaptedModel(service, "sql")
    request = Request(request_id="a", prompt_token_ids=(1,), params=SamplingParams())
    front.submit(request, lambda heard: None)
    front.submit(replace(request, adapter="a/chat"), lambda heard: None)
    assert [each.adapter for each in service.requests] == ["sql", "a/chat"]


class RecordingService:
    """The part of a service that requests go through."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request, listener: Any) -> None:
        self.requests.append(request)


def usage_error(*words: str) -> str:
    found = CliRunner().invoke(main, ["serve", *words])
    assert found.exit_code == 2
    return found.output


def test_usage(folder: Path, tmp_path: Path) -> None:
    base, sql = str(folder / "tiny"), f"sql={folder / 'sql'}"
    assert "'sql' is not NAME=DIR" in usage_error(base, "--lora", "sql")
    assert "two adapters have the name 'sql'" in usage_error(base, "--lora", sql, "--lora", sql)
    assert "the adapter 'sql' has the name of the model" in usage_error(base, "--name", "sql", "--lora", sql)
    assert "the adapter 'sql' has the name of the model" in usage_error(str(folder / "sql"), "--lora", sql)
    config = json.loads((folder / "sql/adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "away"}))
    assert "has adapters of the model 'away'" in usage_error(str(tmp_path), "--port", "0")
    with pytest.raises(ValueError, match="has adapters, and not a model: give the model that they were"):
        LLM(folder / "sql")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    for ranks in ((), ("--tp", "2")):
        found = usage_error(
            base, "--lora", f"sql={tmp_path}", "--lora", "chat=/nowhere", *ranks, "--port", "0"
        )
        assert "use_dora=True" in found
        assert "adapter 'chat'" in found
