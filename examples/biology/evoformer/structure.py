"""Files of a predicted structure: PDB text, and a picture of its confidence."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.esm.openfold_utils import OFProtein, atom14_to_atom37, to_pdb


def pdb_of(output: Any, chains: Tensor) -> str:
    """Return the PDB text of the first protein of an output of ESMFold.

    B factors are pLDDT, from 0 to 100. Residues are numbered from 1 in each chain.

    Args:
        output: The output.
        chains: (residues,): the index of the chain of each residue; -1 for a residue that is left out.
    """
    is_shown = chains >= 0
    atoms = {name: output[name][0].cpu() for name in ("residx_atom37_to_atom14", "atom37_atom_exists")}
    positions = atom14_to_atom37(output["positions"][-1, 0].float().cpu(), atoms)
    counts = [int((chains == chain).sum()) for chain in range(int(chains.max()) + 1)]
    protein = OFProtein(
        aatype=output["aatype"][0].cpu()[is_shown].numpy(),
        atom_positions=positions[is_shown].numpy(),
        atom_mask=atoms["atom37_atom_exists"][is_shown].numpy(),
        residue_index=np.concatenate([np.arange(1, count + 1) for count in counts]),
        b_factors=100 * output["plddt"][0].float().cpu()[is_shown].numpy(),
        chain_index=chains[is_shown].numpy(),
    )
    return to_pdb(protein)


def residue_plddt(output: Any, chains: Tensor) -> Tensor:
    """Return the pLDDT of the CA of each residue of the chains, (residues,), from 0 to 100."""
    ca = 1  # of the 37 kinds of atoms
    values: Tensor = 100 * output["plddt"][0, :, ca].float().cpu()
    return values[chains >= 0]


def draw(output: Any, chains: Tensor, path: Path) -> None:
    """Draw a PNG file of pLDDT along the residues and of the predicted aligned error of pairs."""
    import matplotlib  # here: seconds, and rank 0 alone draws

    matplotlib.use("Agg")  # no screen is needed
    from matplotlib import pyplot

    is_shown = chains >= 0
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), dpi=120, layout="constrained")
    values = residue_plddt(output, chains)
    residues = torch.arange(1, len(values) + 1)
    left.plot(residues, values, color="tab:blue")
    left.set(xlabel="residue", ylabel="pLDDT", ylim=(0, 100), title=f"{path.stem}, mean {values.mean():.1f}")
    left.grid(alpha=0.25)
    error = output["predicted_aligned_error"][0].float().cpu()[is_shown][:, is_shown]
    extent = (0.5, len(values) + 0.5) * 2  # residues are numbered from 1
    image = right.imshow(error, cmap="Greens_r", vmin=0, vmax=30, origin="lower", extent=extent)
    figure.colorbar(image, ax=right, label="predicted aligned error (Å)")
    ends = [int((chains[is_shown] <= chain).sum()) for chain in range(int(chains.max()))]
    for end in ends:  # between two chains
        left.axvline(end + 0.5, color="0.4", linestyle="--")
        right.axvline(end + 0.5, color="0.4", linestyle="--")
        right.axhline(end + 0.5, color="0.4", linestyle="--")
    right.set(xlabel="residue", ylabel="aligned residue")
    draft = path.with_name(f"{path.name}.tmp")
    figure.savefig(draft, format="png")
    draft.replace(path)
    pyplot.close(figure)
