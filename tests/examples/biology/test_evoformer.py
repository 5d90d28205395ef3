"""The Evoformer example: precision against mutual information, resuming, A3M and PDB files, its parts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.scripts import EXAMPLES, config_file, example_module, run_script
from tests.ranks import RanksError, run_ranks

CONFIGS = EXAMPLES / "biology" / "evoformer" / "configs"
a3m = example_module("biology/evoformer/a3m.py")
alignment = example_module("biology/evoformer/alignment.py")
alphabet = example_module("biology/evoformer/alphabet.py")
data = example_module("biology/evoformer/data.py")
loss = example_module("biology/evoformer/loss.py")
metric = example_module("biology/evoformer/metric.py")
model = example_module("biology/evoformer/model.py")

TINY = {
    "TRAINING_FAMILIES": 24,
    "EVALUATION_FAMILIES": 3,  # not a multiple of the ranks
    "LENGTHS": (12, 15),  # not multiples of the ranks
    "NUM_SEQUENCES": 6,
    "CLUSTERS": 3,
    "BLOCKS": 1,
    "BATCH_SIZE": 4,
    "WARMUP_STEPS": 1,
    "EVALUATIONS": 2,
}
GOAL = 0.8  # precision of the best L/5 pairs


def train(folder: Path, config: Path, *more: str, num_ranks: int = 2) -> dict[str, Any]:
    """Run the script, and return the content of its progress file."""
    options = (f"--config={config}", f"--output={folder}", *more)
    run_ranks(run_script, num_ranks, "biology/evoformer/train.py", *options)
    progress: dict[str, Any] = json.loads((folder / "progress.json").read_text())
    return progress


def losses_of(progress: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in progress["records"]]


@pytest.mark.dist
def test_a_run_learns_and_resumes_to_equal_losses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, folder = config_file(tmp_path, CONFIGS / "dap.py", **TINY), tmp_path / "run"
    whole = train(folder, config)
    output = capfd.readouterr().out
    assert re.search(r"precision [01]\.\d{3}, mutual information [01]\.\d{3}", output)
    assert [line for line in output.splitlines() if len(line) > 80 and "INFO" not in line] == []  # but logs
    assert [record["families"] for record in whole["records"]] == [12, 24]
    assert losses_of(whole)[-1] < losses_of(whole)[0]
    assert (folder / "contacts.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(RanksError, match=r"has checkpoints: go on with --resume"):
        train(folder, config)
    for number in range(2):
        write_family(tmp_path, f"protein{number}", num_residues=12, num_sequences=2)
    with pytest.raises(RanksError, match=r"--resume: the run is on drawn families, not on files"):
        train(folder, config, "--resume", f"--data={tmp_path}")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")  # as if the run had been killed before
    resumed = train(folder, config, "--resume")
    assert [{**record, "speed": 0} for record in resumed["records"]] == [
        {**record, "speed": 0} for record in whole["records"]
    ]


@pytest.mark.dist
def test_methods_agree(tmp_path: Path) -> None:
    one = train(tmp_path / "one", config_file(tmp_path, CONFIGS / "dap.py", **TINY), num_ranks=1)
    other = train(tmp_path / "data", config_file(tmp_path, CONFIGS / "data.py", **TINY))
    assert losses_of(other) == pytest.approx(losses_of(one), rel=1e-4)  # float32


@pytest.mark.dist
def test_a_folder_of_alignments(tmp_path: Path) -> None:
    for number in range(3):
        write_family(tmp_path, f"protein{number}", num_residues=14 + number, num_sequences=4)
    # The methods of AlphaFold's config at small sizes: bf16, recomputed blocks, ZeRO, a shared protein.
    config = config_file(tmp_path, CONFIGS / "alphafold.py", **ALPHAFOLD)
    progress = train(tmp_path / "run", config, f"--data={tmp_path}")
    assert [record["families"] for record in progress["records"]] == [16, 32]
    assert losses_of(progress)[-1] < losses_of(progress)[0]


SMALL = {"msa_heads": 2, "msa_head_dim": 8, "pair_heads": 2, "pair_head_dim": 8, "triangle_dim": 8}
ALPHAFOLD = {
    **{key: TINY[key] for key in ("CLUSTERS", "NUM_SEQUENCES", "WARMUP_STEPS")},
    **{"C_M": 16, "C_Z": 16, "C_E": 8, "MAIN_OPTIONS": SMALL, "EXTRA_OPTIONS": SMALL},
    **{"BLOCKS": 2, "EXTRA_BLOCKS": 1, "RECYCLES": 1, "CROP": 12, "DAP_SIZE": 2},
    **{"TRAINING_FAMILIES": 32, "BATCH_SIZE": 2, "LEARNING_RATE": 2e-3, "EVALUATIONS": 2},
}


def write_family(folder: Path, name: str, *, num_residues: int, num_sequences: int) -> str:
    """Write an alignment and a structure: residues on a line which turns back, numbered from 101."""
    generator = np.random.default_rng(num_residues)
    rows = ["".join(generator.choice(list(alphabet.RESIDUES), num_residues)) for _ in range(num_sequences)]
    lines = [f">{number} a protein\n{row[:5]}\n{row[5:]}\n" for number, row in enumerate(rows)]
    (folder / f"{name}.a3m").write_text("".join(lines))
    names = {letter: residue for residue, letter in reversed(alphabet.NAMES.items())}
    atoms = []
    for number, letter in enumerate(rows[0]):
        x, y = (number, 0) if number < num_residues // 2 else (num_residues - 1 - number, 1)
        for atom in ("CA", "CB"):
            place = f"{5.0 * x:8.3f}{5.0 * y:8.3f}{0:8.3f}"
            atoms.append(f"ATOM  {1:5}  {atom}  {names[letter]} A{101 + number:4}    {place}  1.00  0.00\n")
    (folder / f"{name}.pdb").write_text("".join(atoms))
    return rows[0]


@pytest.mark.unit
def test_contacts_of_a_structure(tmp_path: Path) -> None:
    query = write_family(tmp_path, "protein", num_residues=12, num_sequences=1)
    path = tmp_path / "protein.pdb"
    contacts = a3m.read_contacts(path, query)
    places = torch.tensor([[min(k, 11 - k), k // 6] for k in range(12)]) * 5.0
    assert torch.equal(contacts, (torch.cdist(places, places) < 8).float())
    assert contacts[0, 11] == 1  # the ends touch

    # A missing residue in a longer query; another model and chain, hydrogens, water are not read.
    lines = [line for line in path.read_text().splitlines(keepends=True) if line[22:26] != " 105"]
    others = ["TER\n", lines[0].replace(" A ", " B ")]
    path.write_text(
        "".join([lines[0].replace("CA", "HA"), *lines, lines[0].replace(lines[0][17:20], "HOH"), *others])
    )
    longer = a3m.read_contacts(path, f"GG{query}G")
    known = torch.tensor([k for k in range(12) if k != 4])
    assert torch.equal(longer[2 + known][:, 2 + known], contacts[known][:, known])
    missing = torch.tensor([0, 1, 6, 14])
    assert longer[missing].isnan().all()
    assert longer[:, missing].isnan().all()
    with pytest.raises(ValueError, match=r"protein\.pdb has other residues than the query"):
        a3m.read_contacts(path, query[::-1])
    with pytest.raises(ValueError, match=r"protein\.pdb fits in 2 places of its query"):
        a3m.read_contacts(path, query + query)
    path.write_text(lines[1].replace("101", "1x1"))
    with pytest.raises(ValueError, match=r"protein\.pdb, line 1 is not an atom in PDB format: 'ATOM"):
        a3m.read_contacts(path, query)


@pytest.mark.unit
def test_alignments_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "one.a3m"
    path.write_text("\ufeff#4\t1\r\n>query\r\nAR\r\nND*\r\n>insertion\r\nA-aaNB\r\n\0", encoding="utf-8")
    assert a3m.read_a3m(path) == ["ARND", "A-NB"]
    assert alphabet.encode("A-NB").tolist() == [0, alphabet.GAP, 2, alphabet.UNKNOWN]
    path.write_text(">query\nARND\n>short\nARN\n")
    with pytest.raises(ValueError, match=r"one\.a3m, sequence 2 has 3 aligned residues; the first one has 4"):
        a3m.read_a3m(path)
    for text in ("ARND\n", ">query\narnd\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"one\.a3m has no sequence in A3M format"):
            a3m.read_a3m(path)
    with pytest.raises(FileNotFoundError, match=r"0 pairs of files NAME\.a3m and NAME\.pdb"):
        a3m.find_files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none: there is no such folder"):
        a3m.find_files(tmp_path / "none")


@pytest.mark.unit
def test_samples_of_a_folder_are_functions_of_their_index(tmp_path: Path) -> None:
    for number in range(3):
        write_family(tmp_path, f"protein{number}", num_residues=20 + number, num_sequences=9)
    files = a3m.find_files(tmp_path)
    options = {"seed": 3, "num_sequences": 4, "crop": 8, "masked": 0.2}
    samples = a3m.A3MFamilies(files, 30, **options)
    again = a3m.A3MFamilies(files, 30, **options)
    drawn = [samples[index] for index in range(30)]
    assert all(torch.equal(each.inputs, again[index].inputs) for index, each in enumerate(drawn))
    assert {tuple(each.letters.shape) for each in drawn} == {(4, 8)}
    queries = [bytes(alphabet.encode(a3m.read_a3m(path)[0]).tolist()) for path in files]
    turn = [[bytes(each.letters[0].tolist()) in query for query in queries].index(True) for each in drawn]
    assert all(sorted(turn[begin : begin + 3]) == [0, 1, 2] for begin in range(0, 30, 3))  # each once
    assert len({tuple(turn[begin : begin + 3]) for begin in range(0, 30, 3)}) > 1
    assert len({bytes(each.letters[1].tolist()) for each in drawn}) > 20  # other sequences, other places


@pytest.mark.unit
def test_drawn_families() -> None:
    options = {"seed": 5, "lengths": (20, 24), "num_sequences": 200, "mutated": 0.9}
    families = data.SyntheticFamilies(12, **options)
    later = data.SyntheticFamilies(2, begin=10, **options)
    assert torch.equal(later[1].letters, families[11].letters)
    assert not torch.equal(
        data.SyntheticFamilies(1, **{**options, "seed": 6})[0].contacts, families[0].contacts
    )
    assert {families[index].letters.shape[1] for index in range(12)} <= set(range(20, 25))
    for index in range(12):
        contacts = families[index].contacts
        assert torch.equal(contacts, contacts.T)
        assert contacts.sum(0).max() == 1
        first, second = contacts.triu().nonzero(as_tuple=True)
        assert len(first) >= len(contacts) // 5  # so the precision can be 1
        assert (second - first).min() >= data.SEPARATION
        # With many independent sequences, mutual information tells contacts without a model.
        scores = metric.mutual_information(families[index].letters)
        assert metric.precision(scores, contacts, num_residues=len(contacts)) > 0.9
    with pytest.raises(IndexError, match=r"family 12 of 12"):
        families[12]


@pytest.mark.unit
def test_precision_counts_the_best_known_pairs() -> None:
    scores, contacts = torch.zeros(12, 12), torch.zeros(12, 12)
    scores[0, 8], scores[1, 9], scores[2, 10] = 3, 2, 1
    scores[0, 1] = scores[0, 11] = 9  # neighbours are not counted; a residue of padding
    contacts[0, 8] = 1
    assert metric.precision(scores, contacts, num_residues=11) == 0.5  # 11 // 5 pairs
    contacts[1, 9] = float("nan")
    contacts[2, 10] = 1
    assert metric.precision(scores, contacts, num_residues=11) == 1.0
    assert np.isnan(metric.precision(scores, contacts, num_residues=6))


@pytest.mark.unit
def test_mutual_information_by_its_definition() -> None:
    letters = torch.randint(3, (7, 5), generator=torch.Generator().manual_seed(1))
    raw = torch.zeros(5, 5, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            for a in range(3):
                for b in range(3):
                    both = ((letters[:, i] == a) & (letters[:, j] == b)).double().mean()
                    one, other = (letters[:, i] == a).double().mean(), (letters[:, j] == b).double().mean()
                    if i != j and both > 0:
                        raw[i, j] += both * (both / one / other).log()
    means = raw.sum(1) / 4
    wanted = raw - means[:, None] * means / means.mean()
    torch.testing.assert_close(metric.mutual_information(letters), wanted)
    assert metric.mutual_information(torch.zeros(3, 4, dtype=torch.int64)).abs().max() == 0


def small_model(num_clusters: int = 3) -> torch.nn.Module:
    """Return a model in float64 whose parameters are all random."""
    torch.manual_seed(0)
    sizes = {"pair_heads": 2, "pair_head_dim": 4, "msa_heads": 2, "msa_head_dim": 4, "outer_dim": 4}
    built: torch.nn.Module = model.ContactModel(
        c_m=8, c_z=8, c_e=8, num_clusters=num_clusters, num_blocks=1, num_extra_blocks=1, num_recycles=1,
        main=sizes, extra=sizes,
    ).double().eval()  # fmt: skip
    for param in built.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return built


@pytest.mark.unit
def test_padding_changes_nothing() -> None:
    families = data.SyntheticFamilies(2, seed=1, lengths=(14, 19), num_sequences=5, masked=0.2)
    alignments = [families[0], families[1]]
    lengths = [each.letters.shape[1] for each in alignments]
    assert lengths[0] != lengths[1]
    built = small_model()
    batch = alignment.collate(alignments, num_sequences=8)
    contacts, letters = built(batch.inputs, batch.exists)
    total = loss.contact_loss(contacts, batch.contacts) + loss.letter_loss(letters, batch)
    losses = []
    for index, (each, length) in enumerate(zip(alignments, lengths, strict=True)):
        alone = alignment.collate([each], num_sequences=5)
        one_contacts, one_letters = built(alone.inputs, alone.exists)
        torch.testing.assert_close(contacts[index, :length, :length], one_contacts[0])
        torch.testing.assert_close(letters[index, :, :length], one_letters[0])
        losses.append(loss.contact_loss(one_contacts, alone.contacts) + loss.letter_loss(one_letters, alone))
    torch.testing.assert_close(total, sum(losses) / 2)
    total.backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in built.parameters())


@pytest.mark.unit
def test_each_part_of_the_input_counts() -> None:
    family = data.SyntheticFamilies(1, seed=1, lengths=(14, 14), num_sequences=6)[0]
    batch = alignment.collate([family], num_sequences=6)
    built = small_model()
    found, _ = built(batch.inputs, batch.exists)
    torch.testing.assert_close(found, found.transpose(1, 2))
    for sequence in (0, 2, 5):  # the query, the main stack, the extra stack
        other = batch.inputs.clone()
        other[0, sequence, 4] = (other[0, sequence, 4] + 1) % 20
        assert not torch.allclose(built(other, batch.exists)[0], found)
    built.num_recycles = 0
    assert not torch.allclose(built(batch.inputs, batch.exists)[0], found)


@pytest.mark.dist
def test_configs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for values, message in (
        ({"BATCH_SIZE": 3}, r"BATCH_SIZE is 3; 2 data-parallel ranks need a multiple"),
        ({"NUM_SEQUENCES": 3}, r"NUM_SEQUENCES is 3; it must exceed CLUSTERS \(3\)"),
        ({"TRAINING_FAMILIES": 3}, r"TRAINING_FAMILIES is 3; a step has BATCH_SIZE \(4\)"),
    ):
        config = config_file(tmp_path, CONFIGS / "data.py", **{**TINY, **values})
        with pytest.raises(RanksError, match=message):
            train(tmp_path / "run", config)
    with pytest.raises(RanksError, match=r"--resume: .*run has no checkpoint; leave it out to start"):
        train(tmp_path / "run", config_file(tmp_path, CONFIGS / "data.py", **TINY), "--resume")


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize("config", ["dap", "data"])
def test_contacts_are_found(tmp_path: Path, config: str) -> None:
    progress = train(tmp_path / "run", CONFIGS / f"{config}.py")
    assert progress["records"][-1]["precision"] >= GOAL
    assert progress["baseline"] < GOAL
