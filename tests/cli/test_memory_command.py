"""`colossalai memory`: its formulas against the papers and against training, and the command."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE, FullPrecision, OptimizerWrapper, apply_precision, precision_of
from colossalai.cli._benchmark._measure import saved_bytes
from colossalai.cli._main import main
from colossalai.cli._memory._report import TrainingSetup, report_of
from colossalai.cli._memory._shape import MODEL_NAMES, count_parameters, shape_of
from colossalai.cli._picture import size_text
from colossalai.core import global_context as gpc
from colossalai.model_zoo.bert import bert_base
from colossalai.model_zoo.gpt import GPT, GPTConfig, gpt2_small
from colossalai.pipeline import cut_model
from colossalai.runtime.memory import STORAGE, BlockExtents, block_bytes, output_row, state_bytes
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/features/memory.md"
SMALL = GPTConfig(
    hidden_size=128, num_layers=4, num_attention_heads=4, vocab_size=3000, max_position_embeddings=64,
    dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0,
)  # fmt: skip
PRECISIONS = {
    "fp32": FullPrecision(),
    "bf16": precision_of(AMP_TYPE.BF16),
    "bf16_master": precision_of(AMP_TYPE.BF16, {"master_weights": True}),
    "fp16": precision_of(AMP_TYPE.TORCH),
    "fp16_naive": precision_of(AMP_TYPE.NAIVE),
}
BLOCK = BlockExtents(
    seq=64, batch=4, hidden=128, heads=4, inner=512, has_dropout=False, has_attention_dropout=False
)


def invoke(*args):
    return CliRunner().invoke(main, ["memory", *args], env={"COLUMNS": "100"})


def figures(*args):
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def bytes_of(report, kind="states"):
    return {row["name"]: row["num_bytes"] for row in report[kind]}


@pytest.mark.unit
def test_the_states_are_those_of_the_zero_paper():
    """Figure 1 of 1910.02054: 7.5B parameters, 64 ranks, Adam in mixed precision; GB of 10^9 bytes."""
    gigabytes = [
        sum(state_bytes(7_500_000_000, STORAGE["bf16_master"], dp=64, zero=zero).values()) / 1e9
        for zero in range(4)
    ]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.unit
def test_a_block_is_that_of_the_activation_paper():
    """Section 4 of 2205.05198, for 16 bits: s b h (34 + 5 a s / h), and (10 + 24/t + 5 a s / h t) with tp."""
    block = BlockExtents(seq=2048, batch=2, hidden=4096, heads=32, inner=4 * 4096, has_scores=True)
    sbh, scores = 2048 * 2 * 4096, 5 * 32 * 2048 / 4096
    storage = STORAGE["bf16_master"]
    assert block_bytes(block, storage) == sbh * (34 + scores)
    assert block_bytes(block, storage, tp=8) == sbh * (10 + 24 / 8 + scores / 8)
    assert block_bytes(replace(block, has_scores=False), storage) == sbh * 34


def convert(name, num_layers=4):
    torch.manual_seed(0)
    model = GPT(replace(SMALL, num_layers=num_layers))
    masters = PRECISIONS[name].convert_model(model, float32_grads=True)
    return model, apply_precision(model, PRECISIONS[name], "cpu"), masters


def loss_of(computing):
    ids = torch.randint(3000, (4, 64), generator=torch.Generator().manual_seed(0))
    return nn.functional.cross_entropy(computing(ids).flatten(0, 1), ids.flatten())


def saved_by(name, num_layers):
    model, computing, _ = convert(name, num_layers)
    with saved_bytes(model.parameters()) as count:
        loss_of(computing)
    return count.num_bytes


@pytest.mark.unit
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_master", "fp16_naive"])
def test_activations_are_what_a_forward_saves(name):
    small, large = saved_by(name, 2), saved_by(name, 4)
    storage = STORAGE[name]
    cast = storage.cast * 12 * 128**2
    assert (large - small) / 2 == pytest.approx(block_bytes(BLOCK, storage) + cast, rel=0.01)
    ends = output_row(BLOCK, storage, num_outputs=3000, per_token=True, tp=1).num_bytes
    assert small - (large - small) == pytest.approx(ends + storage.cast * 3000 * 128, rel=0.01)


@pytest.mark.unit
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_states_are_what_a_step_leaves(name):
    model, computing, masters = convert(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = OptimizerWrapper(optimizer, masters=masters.replace_params(optimizer))
    wrapped.backward(loss_of(computing))
    wrapped.step()
    held = {
        "parameters": list(model.parameters()),
        "gradients": [param.grad for param in model.parameters()],
        "master weights": optimizer.param_groups[0]["params"] if len(wrapped.masters) else [],
        "optimizer states": [
            tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()
        ],
    }
    measured = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in held.items()}
    (report,) = [report_of(replace(shape_of("gpt2-small"), **count_parameters(model)), job(precision=name))]
    reckoned = {row.name: row.num_bytes for row in report.states}
    reckoned["gradients"] += reckoned.pop("gradients in float32", 0)  # in one tensor
    assert {kind: size for kind, size in measured.items() if size} == reckoned


def job(**options):
    defaults = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "precision": "fp32", "batch": 1, "seq": 64}
    return TrainingSetup(**(defaults | {"recompute": False, "has_scores": False} | options))


@pytest.mark.unit
def test_stages_hold_what_is_reckoned():
    config = replace(SMALL, num_layers=5)
    shape = replace(shape_of("gpt2-small"), **count_parameters(GPT(config)))
    stages = [
        sum(param.numel() for param in cut_model(GPT(config), 2, [stage], balance="parameters").parameters())
        for stage in range(2)
    ]
    report = report_of(shape, job(pp=2))
    assert report.states[0].num_bytes == 4 * stages[report.stage]


def numel_on_ranks():
    colossalai.launch_from_torch(config={"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    counts = {}
    for build in (gpt2_small, bert_base):
        with torch.device("meta"):
            counts[build.__name__.replace("_", "-")] = sum(param.numel() for param in build().parameters())
    gpc.destroy()
    return counts


@pytest.mark.dist
def test_tensor_parallel_ranks_hold_what_is_reckoned():
    for name, num_params in run_ranks(numel_on_ranks, 2)[0].items():
        (parameters, *_) = figures("--model", name, "--tp", "2", "--precision", "fp32")["states"]
        assert parameters["num_bytes"] == pytest.approx(4 * num_params, rel=0.01), name


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-xl", 1558), ("GPT2_small", 124), ("bert-large", 335), ("vit-huge", 632)]
)
def test_parameters_are_those_that_are_published(name, millions):
    assert figures("--model", name)["num_params"] / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.unit
@pytest.mark.parametrize(
    "options",
    [
        ("--dp", "8", "--zero", "2"),
        ("--precision", "bf16", "--batch", "3", "--attention", "eager"),
        ("--precision", "fp32", "--recompute", "--zero", "3", "--dp", "4"),
        ("--dp", "4", "--tp", "5", "--pp", "6", "--zero", "1", "--recompute", "--seq", "512"),
        ("--dp", "2", "--precision", "fp16_naive", "--attention", "eager", "--tp", "5", "--recompute"),
    ],
)
def test_the_numbers_of_a_formula_give_its_bytes(options):
    report = figures("--model", "gpt2-xl", *options)
    rows = [*report["states"], *report["activations"]]
    for row in rows:
        assert re.fullmatch(r"[\d.e+*/() ]+", row["numbers"])
        assert eval(row["numbers"]) == pytest.approx(row["num_bytes"], abs=1), row["name"]
    assert sum(row["num_bytes"] for row in rows) == report["total_bytes"]


@pytest.mark.unit
def test_what_the_options_do():
    plain = figures("--model", "gpt2-xl")
    cut = figures("--model", "gpt2-xl", "--dp", "8", "--zero", "2")
    assert bytes_of(plain)["gradients in float32"] == 2 * plain["num_params"]
    assert bytes_of(cut)["gradients"] == bytes_of(plain)["gradients"] / 8
    assert "gradients in float32" not in bytes_of(cut)
    kept = bytes_of(plain, "activations")["activations of blocks"]
    assert kept == 48 * 1024 * 1600 * 34
    recomputed = bytes_of(figures("--model", "gpt2-xl", "--recompute"), "activations")
    assert recomputed["inputs of blocks"] == 48 * 1024 * 1600 * 2
    assert recomputed["the block that is recomputed"] == kept / 48
    staged = figures("--model", "gpt2-xl", "--pp", "4", "--batch", "2")
    (blocks,) = (row for row in staged["activations"] if row["name"] == "activations of blocks")
    assert staged["stage"] == 1  # the first one has fewer blocks beside the embedding
    assert blocks["num_bytes"] == 13 * 3 * 2 * kept / 48  # 3 microbatches in flight
    assert "norm, head and loss" not in bytes_of(staged, "activations")
    images = figures("--model", "vit-base", "--batch", "2")
    assert (images["seq"], bytes_of(images, "activations")["norm, head and loss"]) == (
        197,
        2 * 197 * 768 * 4 + 4 * 2 * 1000,
    )


@pytest.mark.unit
def test_a_config_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=128, n_layer=4, n_head=4, vocab_size=3000, n_positions=64, architectures=["GPT2LMHeadModel"]
    )
    config.save_pretrained(tmp_path)
    theirs = shape_of(str(tmp_path / "config.json"))
    own = replace(shape_of("gpt2-small"), **count_parameters(GPT(SMALL)))
    assert (theirs.blocks, theirs.first, theirs.last, theirs.tied) == (
        own.blocks, own.first, own.last, own.tied
    )  # fmt: skip
    assert (theirs.hidden, theirs.heads, theirs.inner, theirs.max_length, theirs.num_outputs) == (
        128, 4, 512, 64, 3000
    )  # fmt: skip
    assert theirs.has_dropout
    vit = transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32)
    vit.save_pretrained(tmp_path)
    report = figures("--model", str(tmp_path / "config.json"), "--precision", "bf16")
    assert (report["model"], report["seq"]) == ("ViTModel", 5)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--serve MODEL"),
        (("--model", "gpt5"), f"there is no model 'gpt5': choose one of {', '.join(MODEL_NAMES)}"),
        (("--model", "nosuch.json"), "there is no file 'nosuch.json'"),
        (("--model", "gpt2-xl", "--zero", "4"), "4 is not in the range 0<=x<=3"),
        (("--model", "gpt2-xl", "--precision", "int8"), "--precision int8: choose one of fp32, bf16, fp16,"),
        (("--model", "gpt2-xl", "--pp", "64"), "--pp 64: gpt2-xl has 48 blocks only"),
        (("--model", "gpt2-xl", "--pp", "2", "--zero", "2"), "cannot be combined: stage 2 shards the grad"),
        (("--model", "gpt2-xl", "--tp", "2"), "--tp 2 does not divide the 25 attention heads of gpt2-xl"),
        (("--model", "gpt2-xl", "--seq", "2048"), "--seq 2048: gpt2-xl takes at most 1024"),
        (("--model", "vit-base", "--seq", "64"), "vit-base takes images, of 197 patches: leave it out"),
        (("--model", "gpt2-xl", "--json", "--explain"), "--json has the formulas: leave --explain out"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.unit
def test_a_config_that_is_none_is_refused(tmp_path):
    for text, message in {"{": "is not a config.json", '{"a": 1}': "is not a config.json"}.items():
        (tmp_path / "config.json").write_text(text)
        result = invoke("--model", str(tmp_path / "config.json"))
        assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), result.output


@pytest.mark.unit
def test_the_help_has_an_example():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "colossalai memory --model gpt2-xl --dp 8 --zero 2" in result.output


@pytest.mark.unit
def test_sizes():
    assert [size_text(size) for size in (0, 1023, 2048, 3 * 2**30, 2**52)] == [
        "0 B", "1023 B", "2.00 KiB", "3.00 GiB", "4096.00 TiB"
    ]  # fmt: skip


COMMANDS = re.compile(r"^```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
ON_THE_PAGE = COMMANDS.findall(PAGE.read_text())


@pytest.mark.unit
def test_the_page_has_commands():
    assert len(ON_THE_PAGE) >= 3


@pytest.mark.unit
@pytest.mark.parametrize(("commands", "output"), ON_THE_PAGE)
def test_the_commands_of_the_page_run(commands, output):
    for command in commands.splitlines():
        program, name, *args = command.split()
        assert (program, name) == ("colossalai", "memory")
        result = invoke(*args)
        assert result.exit_code == 0, result.output
        printed = [line.rstrip() for line in result.output.splitlines()]
        assert [line for line in printed if line in output.splitlines() and line] == [
            line for line in output.splitlines() if line
        ]
