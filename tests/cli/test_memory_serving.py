"""`colossalai memory --serve`: the table, the JSON, and what goes with what."""

import json
import re

import pytest
from click.testing import CliRunner

from colossalai.cli._main import main
from colossalai.inference import EngineOptions, serving_memory

pytestmark = pytest.mark.unit
pytest.importorskip("transformers")


def invoke(*args):
    return CliRunner().invoke(main, ["memory", *args], env={"COLUMNS": "80"})


def test_the_figures_are_those_of_the_package():
    result = invoke(
        "--serve", "opt_125M", "--tp", "2", "--pp", "2", "--quantize", "int8", "--kv-dtype", "int8",
        "--block-size", "32", "--max-length", "1000", "--max-running", "3", "--memory", "1GiB", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    options = EngineOptions(quantize="int8", kv_dtype="int8", block_size=32, max_length=1000)
    counted = serving_memory("opt_125M", options, tp=2, pp=2)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    for rank in found["ranks"]:
        stage = counted.stages[rank["stage"]]
        assert rank["rank"] in stage.ranks
        assert rank["weight_bytes"] == stage.weight_bytes
        assert rank["kv_bytes_per_token"] == stage.block_bytes / 32
        assert rank["cache_bytes"] == 3 * 32 * stage.block_bytes  # 1,000 tokens are 32 blocks
        assert rank["requests_that_fit"] == (2**30 - stage.weight_bytes) // (32 * stage.block_bytes)
        assert rank["weights_fit"]
    assert found["requests_that_fit"] == min(rank["requests_that_fit"] for rank in found["ranks"])
    assert (found["tp"], found["pp"], found["quantize"], found["max_length"]) == (2, 2, "int8", 1000)


def test_row_tables_are_counted_with_the_weights():
    args = ("--serve", "opt_125M", "--dtype", "bfloat16", "--row-tables", "--memory", "1GiB")
    result = invoke(*args)
    assert "with row tables" in result.output
    assert "row tables" not in invoke("--serve", "opt_125M", "--no-row-tables").output
    (stage,) = serving_memory("opt_125M", EngineOptions(dtype="bfloat16", has_row_tables=True)).stages
    (rank,) = json.loads(invoke(*args, "--json").output)["ranks"]
    assert rank["row_table_bytes"] == stage.row_table_bytes > 0
    left = 2**30 - stage.weight_bytes - stage.row_table_bytes
    assert rank["requests_that_fit"] == left // (128 * stage.block_bytes)
    assert (
        "no product of opt_125M can have one" in invoke("--serve", "opt_125M", "--row-tables").output
    )  # float16
    wrong = invoke("--model", "gpt3", "--row-tables")
    assert (wrong.exit_code, "--row-tables is an option of --serve MODEL" in wrong.output) == (2, True)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ((), {}),
        (("--row-tables",), {"has_row_tables": True}),
        (("--no-row-tables",), {"has_row_tables": False}),
    ],
)
def test_serve_hands_on_what_is_said_of_row_tables(args, found, monkeypatch):
    given = []
    monkeypatch.setattr("colossalai.serving.serve", lambda options: given.append(options) or 0)
    assert CliRunner().invoke(main, ["serve", "opt_125M", *args]).exit_code == 0
    assert given[0].engine == found


@pytest.mark.long  # `make test` has the same command with its output on the page: test_memory_command.py
def test_the_table_fits_80_columns():
    result = invoke("--serve", "bloom_175B", "--tp", "8", "--quantize", "int8", "--memory", "80GiB")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if line.startswith("  ")]
    assert max(map(len, rows)) <= 80
    assert re.search(r"0-7 +21\.38 GiB +490\.00 KiB +61\.25 GiB +61", result.output)
    assert "61 requests of full length fit into 80.00 GiB" in result.output


def test_weights_that_do_not_fit_are_said():
    result = invoke("--serve", "opt_6B", "--memory", "4GiB")
    assert result.exit_code == 0
    assert "no weights" in result.output
    assert "4.00 GiB of each rank do not hold the weights" in result.output
    found = json.loads(invoke("--serve", "opt_6B", "--memory", "4GiB", "--json").output)
    assert (found["requests_that_fit"], found["ranks"][0]["weights_fit"]) == (0, False)
    found = json.loads(invoke("--serve", "opt_6B", "--json").output)
    assert (found["requests_that_fit"], found["ranks"][0]["requests_that_fit"]) == (None, None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--serve", "opt_125M", "--zero", "1"), "--zero is about training: leave it out with --serve"),
        (("--serve", "opt_125M", "--model", "gpt3"), "--model is about training"),
        (("--serve", "opt_125M", "--trace", "a.png"), "--trace is about training"),
        (("--model", "gpt3", "--quantize", "int8"), "--quantize is an option of --serve MODEL"),
        (("--model", "gpt3", "--max-running", "8"), "--max-running is an option of --serve MODEL"),
        (("--serve", "opt_125"), "did you mean 'opt_125M'"),
        (("--serve", "opt_125M", "--quantize", "int5"), "quantize='int5'"),
        (("--serve", "opt_125M", "--memory", "much"), "--memory much: give bytes"),
        (("--serve", "opt_125M", "--max-length", "4096"), "the window of the model is 2048"),
        (("--serve", "opt_125M", "--tp", "5"), "5"),
        (("--serve", "opt_125M", "--pp", "13"), "13"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args, message):
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
