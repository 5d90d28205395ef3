"""Updates on several ranks and over HTTP: all ranks change between the same two steps."""

from pathlib import Path
from typing import Any

import pytest

from colossalai.inference import LLM, SamplingParams
from tests.inference.models import MIXED
from tests.inference.weights.pairs import FULL, POOL, new_model, saved_pair, texts
from tests.serving.served_folder import save_tiny, serve_folder
from tests.tiers import in_soak

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tp", "pp", "way"),
    [
        ("Llama", 2, 1, "int8"),
        ("Llama", 1, 2, None),
        in_soak("Llama", 2, 2, None),
        in_soak("GPT2", 1, 2, None),
        in_soak("OPT", 2, 1, None),
        in_soak("Llama", 1, 2, "int8-weights"),
    ],
)
def test_texts_on_ranks_are_those_of_new_values(
    family: str, tp: int, pp: int, way: str | None, tmp_path: Path
) -> None:
    old, new = saved_pair(tmp_path, family)
    options: dict[str, Any] = {"tp_size": tp, "pp_size": pp, "kv_memory": POOL, "quantize": way}
    # Rounding to second digits makes 1e-4 of last bits, which other batches change: a cached prefix is one.
    options["is_batch_invariant"] = way == "int8-weights"
    # Codes have other scales on other ranks; without them texts are those of one process.
    with LLM(new, **(options if way else {"kv_memory": POOL})) as other:
        expected = texts(other, MIXED, FULL)
    with LLM(old, **options) as llm:
        before = texts(llm, MIXED, FULL)
        assert before != expected
        for source, wanted in ((new, expected), (old, before), (new_model(family), expected)):
            llm.update_weights(source)
            assert texts(llm, MIXED, FULL) == wanted
        with pytest.raises(ValueError, match="nothing was loaded"):
            llm.update_weights({})
        with pytest.raises((OSError, ValueError)):
            llm.update_weights(tmp_path / "missing")
        assert texts(llm, MIXED, FULL) == expected


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, in_soak(2)])
def test_the_route_changes_what_is_answered(num_ranks: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for param in model.parameters():
        param.data.mul_(0.5)
    model.save_pretrained(tmp_path / "new")
    params = SamplingParams(max_tokens=24, temperature=0)
    before = LLM(folder, kv_memory=POOL).generate("the quick", params)[0].text
    after = (
        LLM(folder, checkpoint=str(tmp_path / "new"), kv_memory=POOL).generate("the quick", params)[0].text
    )
    assert before != after
    words = ("--port", "0", "--kv-memory", "32MiB", "--allow-weight-updates")
    served = serve_folder(tmp_path, str(folder), "--name", "tiny", "--tp", str(num_ranks), *words)
    try:
        served.wait_until_ready()
        assert served.text() == before
        version = served.get("/version").json()["weights_version"]
        bad = served.post("/v1/load_weights", path=str(tmp_path / "nowhere"))
        assert bad.status_code == 400
        assert served.text() == before
        for in_flight in ("finish", "restart"):
            found = served.post("/v1/load_weights", path=str(tmp_path / "new"), in_flight=in_flight)
            assert found.status_code == 200, found.text
            assert served.text() == after
        assert served.get("/version").json()["weights_version"] == version + 2
        assert 'colossalai_weight_updates_total{model="tiny"} 2.0' in served.get("/metrics").text
    finally:
        assert served.end() == 0
