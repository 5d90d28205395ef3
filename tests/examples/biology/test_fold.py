"""Folding in the Evoformer example: budgets, ranks, complexes, files."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig

from colossalai.model_zoo.evoformer import inject_fastnn
from tests.examples.scripts import example_module, run_script
from tests.model_zoo.test_esmfold import esmfold, features
from tests.nn.live_bytes import LiveBytes
from tests.ranks import RanksError, run_ranks

folding = example_module("biology/evoformer/folding.py")
fasta = example_module("biology/evoformer/fasta.py")
structure = example_module("biology/evoformer/structure.py")

NAMES = ("positions", "s_s", "s_z", "plddt", "ptm", "predicted_aligned_error")


def check(found: Any, wanted: Any) -> None:
    for name in NAMES:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-10)


def count_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list which gets the peak of live bytes of each chunked call."""
    peaks = []

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **options: Any) -> Any:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            with LiveBytes(*tensors, *self.parameters(), *self.buffers()) as live:
                result = forward(self, *args, **options)
            peaks.append(live.peak)
            return result

        return run

    for kind in (folding.BlockWithParameters, folding.ChunkedAttention):
        monkeypatch.setattr(kind, "forward", counted(kind.forward))
    return peaks


@pytest.mark.unit
def test_budgets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = inject_fastnn(esmfold()), features(length=12)
    peaks = count_peaks(monkeypatch)
    blocks, attention = model.trunk.blocks, model.trunk.structure_module.ipa
    wanted = folding.fold(model, inputs, num_recycles=1)
    assert peaks == []
    check(folding.fold(model, inputs, memory_budget="1 GB", num_recycles=1), wanted)
    # Two passes with two blocks, and two layers of the structure module each.
    whole, num_calls = max(peaks), len(peaks)
    assert num_calls == 8
    budget = int(0.7 * whole)
    check(folding.fold(model, inputs, memory_budget=budget, num_recycles=1), wanted)
    assert max(peaks[num_calls:]) <= budget
    assert (model.trunk.blocks, model.trunk.structure_module.ipa) == (blocks, attention)
    check(model(**inputs, num_recycles=1), wanted)


@pytest.mark.unit
def test_a_chain_is_that_of_transformers() -> None:
    model = esmfold()
    sequence = "ACDEFGHIKLMNPQRSTVWYX"
    wanted = model.infer_pdb(sequence)
    with pytest.raises(ValueError, match=r"blocks of transformers: call inject_fastnn"):
        folding.fold(model, folding.features_of(sequence))
    output = folding.fold(inject_fastnn(model), folding.features_of(sequence))
    found = structure.pdb_of(output, folding.chains_of(sequence))
    atoms, others = (
        [line for line in text.splitlines() if line.startswith("ATOM")] for text in (found, wanted)
    )
    assert [line[:30] for line in atoms] == [line[:30] for line in others]
    for begin in (30, 38, 46):
        values = [[float(line[begin : begin + 8]) for line in lines] for lines in (atoms, others)]
        assert values[0] == pytest.approx(values[1], abs=2e-3)
    plddt = [[float(line[60:66]) for line in lines] for lines in (atoms, others)]
    assert plddt[0] == pytest.approx([100 * value for value in plddt[1]], abs=0.6)  # two decimals of 0 to 1
    assert structure.residue_plddt(output, folding.chains_of(sequence)).shape == (21,)


@pytest.mark.unit
def test_chains_of_a_complex() -> None:
    inputs, chains = folding.features_of("ACD:EF:G"), folding.chains_of("ACD:EF:G")
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 56)
    assert inputs["input_ids"][0, chains >= 0].tolist() == [0, 4, 3, 6, 13, 7]
    assert set(inputs["input_ids"][0, chains < 0].tolist()) == {7}  # glycine
    assert chains[chains >= 0].tolist() == [0, 0, 0, 1, 1, 2]
    numbers = inputs["position_ids"][0]
    assert numbers[chains >= 0].tolist() == [0, 1, 2, 540, 541, 1079]
    output = folding.fold(inject_fastnn(esmfold()), inputs)
    lines = structure.pdb_of(output, chains).splitlines()
    residues = {(line[17:20], line[21], int(line[22:26])) for line in lines if line.startswith("ATOM")}
    assert residues == {
        ("ALA", "A", 1), ("CYS", "A", 2), ("ASP", "A", 3), ("GLU", "B", 1), ("PHE", "B", 2), ("GLY", "C", 1)
    }  # fmt: skip
    assert len([line for line in lines if line.startswith("TER")]) == 3


def positions_of(path: Path) -> Tensor:
    lines = path.read_text().splitlines()
    return torch.tensor(
        [
            [float(line[begin : begin + 8]) for begin in (30, 38, 46)]
            for line in lines
            if line.startswith("ATOM")
        ]
    )


@pytest.mark.dist
def test_ranks_fold_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    esmfold().save_pretrained(tmp_path / "model")
    (tmp_path / "proteins.fasta").write_text(">one a protein\nACDEFGH\nIKLMN\n")
    (tmp_path / "query.a3m").write_text(">query\nMKV-LA\n>other\nMK--LA\n")
    shared = ["--recycles=0", f"--model={tmp_path / 'model'}"]

    def run(
        folder: str, *more: str, num_ranks: int, files: Sequence[str] = ("proteins.fasta", "query.a3m")
    ) -> str:
        options = [*(str(tmp_path / file) for file in files), *shared, f"--output={tmp_path / folder}", *more]
        run_ranks(run_script, num_ranks, "biology/evoformer/fold.py", *options)
        return capfd.readouterr().out

    run("one", num_ranks=1)
    output = run("two", "--memory-budget=100 kB", num_ranks=2, files=["proteins.fasta"])
    assert re.search(r"^ +12 +\d+\.\d +\d\.\d{3} +\d+\.\d  one$", output, re.MULTILINE)
    assert [line for line in output.splitlines() if len(line) > 80] == []
    output = run("two", num_ranks=2)
    assert "two has 1 of 2 structures already\n" in output
    assert "  one\n" not in output
    assert output.count("  query\n") == 1
    for name, num_residues in (("one", 12), ("query", 5)):
        found, wanted = (tmp_path / folder / f"{name}.pdb" for folder in ("two", "one"))
        assert len({line[21:26] for line in found.read_text().splitlines() if "CA" in line}) == num_residues
        torch.testing.assert_close(positions_of(found), positions_of(wanted), rtol=0, atol=2e-3)
        assert found.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    BertConfig().save_pretrained(tmp_path / "model")
    with pytest.raises(RanksError, match=r"--model .*model: it must be a folder of ESMFold"):
        run("three", num_ranks=1)


@pytest.mark.unit
def test_files_of_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.fasta"
    path.write_text(">one first\r\nacd\r\nEF*\r\n\r\n>two\r\nA:C\r\n")
    assert fasta.read_files([path]) == {"one": "ACDEF", "two": "A:C"}
    for text, message in (
        ("ACD", r"a\.fasta has no sequence in FASTA format"),
        (">one\nA\n>one\nC\n", r"a\.fasta has 'one' twice"),
        ("ACD\n>one\nA\n", r"a\.fasta has letters before its first line of a name"),
        (">\nA\n", r"a\.fasta has a sequence without a name"),
        (">one\nA1\n", r"a\.fasta: 'one' is not a sequence of letters"),
        (">one\nA::C\n", r"a\.fasta: 'one' is not a sequence of letters"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            fasta.read_sequences(path)
    path.write_text(">one\nA\n")
    (tmp_path / "one.a3m").write_text(">query\nAC\n")
    with pytest.raises(ValueError, match=r"one\.a3m has 'one', as a file before"):
        fasta.read_files([path, tmp_path / "one.a3m"])
