r"""Fold proteins by ESMFold on all ranks together, within a bound of memory.

    colossalai run --nproc_per_node 2 \
      examples/biology/evoformer/fold.py --model esmfold proteins.fasta
    colossalai run --nproc_per_node 2 \
      examples/biology/evoformer/fold.py --model esmfold query.a3m \
      --memory-budget "2 GB" --recycles 1

Each protein becomes NAME.pdb, with its pLDDT, and NAME.png in --output.
"""

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from fasta import read_files
from folding import chains_of, features_of, fold
from rich.console import Console
from rich.progress import Progress
from structure import draw, pdb_of, residue_plddt
from transformers import EsmConfig, EsmForProteinFolding
from transformers.utils.logging import disable_progress_bar

import colossalai
from colossalai.core import global_context as gpc
from colossalai.model_zoo.evoformer import inject_fastnn
from colossalai.nn.dap import init_dap
from colossalai.utils import get_current_device

HEADER = f"{'residues':>10}{'pLDDT':>8}{'pTM':>8}{'seconds':>10}  protein"


def main() -> None:
    args = parse_args()
    sequences = read_files(args.files)
    colossalai.launch_from_torch({}, backend=args.backend, verbose=False)
    init_dap()  # before the model is built: all ranks share the pairs of residues
    is_first = dist.get_rank() == 0
    console = Console(quiet=not is_first)
    done = finished(sequences, args.output)
    if done:
        console.print(f"{args.output} has {len(done)} of {len(sequences)} structures already", soft_wrap=True)
    model = load(args.model)
    console.print(HEADER, highlight=False)
    names = [name for name in sequences if name not in done]
    with Progress(console=console, disable=not is_first or not sys.stdout.isatty()) as bar:
        for name in bar.track(names, description="proteins"):
            begin, chains = time.perf_counter(), chains_of(sequences[name])
            features = {key: x.to(get_current_device()) for key, x in features_of(sequences[name]).items()}
            output = fold(model, features, memory_budget=args.memory_budget, num_recycles=args.recycles)
            plddt, seconds = residue_plddt(output, chains), time.perf_counter() - begin
            line = f"{len(plddt):>10,}{plddt.mean():>8.1f}{output.ptm.item():>8.3f}{seconds:>10.1f}  {name}"
            console.print(line, highlight=False, markup=False)
            if is_first:
                draw(output, chains, args.output / f"{name}.png")
                draft = args.output / f"{name}.tmp"
                draft.write_text(pdb_of(output, chains))
                draft.replace(args.output / f"{name}.pdb")
    gpc.destroy()


def load(folder: Path) -> EsmForProteinFolding:
    """Return the model of a folder, on the device of this rank."""
    if dist.get_rank() > 0:
        disable_progress_bar()
    if not (folder / "config.json").exists() or not EsmConfig.from_pretrained(folder).is_folding_model:
        raise ValueError(f"--model {folder}: it must be a folder of ESMFold, as save_pretrained writes it")
    model = EsmForProteinFolding.from_pretrained(folder).eval()
    if get_current_device().type == "cpu" and model.esm.dtype == torch.float16:
        model.esm.float()  # products of float16 are slow there
    return inject_fastnn(model).to(get_current_device())


def finished(sequences: Collection[str], folder: Path) -> list[str]:
    """Make the folder, and return the names of the structures that rank 0 finds there, on all ranks."""
    found: list[list[str]] = [[]]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        found = [[name for name in sequences if (folder / f"{name}.pdb").exists()]]
    dist.broadcast_object_list(found)
    return found[0]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="FASTA files, and A3M files of one query each")
    parser.add_argument("--model", type=Path, required=True, help="a folder of ESMFold, of transformers")
    parser.add_argument("--output", type=Path, default=Path("folded"), help="folder of the results (folded)")
    parser.add_argument("--memory-budget", help='bytes of activations, such as "2 GB" (no bound)')
    parser.add_argument("--recycles", type=int, help="passes after the first one (those of the model)")
    parser.add_argument("--backend", default="auto", help="auto, nccl or gloo")
    return parser.parse_args()


if __name__ == "__main__":
    main()
