"""Plans of AutoChunk: regions, chunk sizes, and predicted memory and time."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from colossalai.runtime.memory import bytes_text

_FORMAT = "colossalai-autochunk"
_UNITS = {
    "": 1,
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True)
class ChunkRegion:
    """Operations that run chunk by chunk.

    Attributes:
        module: Name of the innermost module that contains all of them; "" for the model.
        first: Name of the first operation.
        last: Name of the last operation.
        dims: Chunk dimension of operations from which it is followed, by name; always includes the last one.
        extent: Extent of the chunk dimension.
        size: Elements of a chunk.
        peak: Predicted live bytes within the region.
        unchunked_peak: Live bytes without chunks.
    """

    module: str
    first: str
    last: str
    dims: Mapping[str, int]
    extent: int
    size: int
    peak: int
    unchunked_peak: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.extent // self.size)


@dataclass(frozen=True)
class ChunkPlan:
    """Chunked regions of a model for arguments of certain shapes.

    Peaks are live bytes of activations: of the tensors that operations make, the model's outputs included,
    without parameters, buffers and arguments.

    Attributes:
        model: Class of the model.
        digest: The sha256 of the trace that the plan belongs to.
        memory_budget: Largest allowed peak in bytes.
        inplace: Whether outputs of regions take the memory of inputs.
        recompute: Whether normalizations and elementwise results are computed again for each use.
        peak: Predicted peak.
        unchunked_peak: Peak without chunks.
        slowdown: Predicted time, divided by that without chunks. Kernel rates are rough constants.
        regions: The regions, in the order in which they run.
    """

    model: str
    digest: str
    memory_budget: int
    inplace: bool
    recompute: bool
    peak: int
    unchunked_peak: int
    slowdown: float
    regions: tuple[ChunkRegion, ...]

    def __str__(self) -> str:
        lines = [
            f"AutoChunk of {self.model}: peak {bytes_text(self.peak)} of {bytes_text(self.unchunked_peak)} "
            f"({self.peak / max(1, self.unchunked_peak):.0%}), budget {bytes_text(self.memory_budget)}",
            f"predicted time {self.slowdown:.2f}x, {len(self.regions)} regions"
            + ", recomputed norms" * self.recompute
            + ", in place" * self.inplace,
        ]
        if self.regions:
            lines += ["", f"{'module':28.28} {'last operation':20.20} {'dim':>3} {'chunk':>11} {'peak':>12}"]
        for each in self.regions:
            chunk = f"{each.size}/{each.extent}"
            lines.append(
                f"{_shortened(each.module or '(model)', 28):28} {_shortened(each.last, 20):20} "
                f"{each.dims[each.last]:3} {chunk:>11} {bytes_text(each.peak):>12}"
            )
        return "\n".join(lines)

    def explain(self) -> str:
        """Return the plan with the operations, chunks and peaks of each region."""
        lines = [str(self)]
        for number, each in enumerate(self.regions):
            lines += [
                "",
                f"chunk_{number}: {each.first} to {each.last}",
                f"    in {each.module or 'the model'}, {each.num_chunks} chunks of {each.size} of "
                f"{each.extent}",
                f"    peak {bytes_text(each.unchunked_peak)} before, {bytes_text(each.peak)} after",
            ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"format": _FORMAT, "version": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, name: str = "the text") -> "ChunkPlan":
        """Return the plan of a JSON text.

        Args:
            text: The text.
            name: Its name in messages.

        Raises:
            ValueError: `text` is not such a plan.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{name} is not a plan of autochunk: its format is not {_FORMAT!r}")
        if content.get("version") != 1:
            raise ValueError(f"{name} has version {content.get('version')!r}; this release reads 1")
        regions = content.get("regions")
        if not isinstance(regions, list):
            raise ValueError(f"{name}: regions is {regions!r:.80}; it must be a list")
        read = [ChunkRegion(**_parts(ChunkRegion, each, f"{name}, a region")) for each in regions]
        del content["format"], content["version"]
        content = {"inplace": False, "recompute": False, **content}
        return cls(**{**_parts(cls, content, name), "regions": tuple(read)})

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "ChunkPlan":
        """Read a plan from a JSON file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not such a plan.
        """
        return cls.from_json(Path(path).read_text(), name=str(path))


_IS_TYPE = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (lambda value: type(value) is int and value >= 0, "an integer of 0 or more"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "float": (lambda value: isinstance(value, int | float) and value >= 0, "a number of 0 or more"),
}


def _parts(cls: type[Any], content: Any, name: str) -> dict[str, Any]:
    """Return the fields of a class from JSON.

    Raises:
        ValueError: A field is missing, unknown, or of another type.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{name} is {content!r:.80}; it must be an object")
    known = {each.name: each.type for each in fields(cls)}
    if wrong := [*(set(known) - set(content)), *(set(content) - set(known))]:
        raise ValueError(f"{name} lacks or should not have {sorted(wrong)}; its parts are {', '.join(known)}")
    for part, kind in known.items():
        of_name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        check = _IS_TYPE.get(of_name)
        if check is not None and not check[0](content[part]):
            raise ValueError(f"{name}: {part} is {content[part]!r:.80}; it must be {check[1]}")
    if "dims" in known:
        dims, size = content["dims"], content["size"]
        if not (isinstance(dims, dict) and all(type(each) is int for each in dims.values())):
            raise ValueError(f"{name}: dims is {dims!r:.80}; it must be a dimension for each operation")
        if not 1 <= size <= content["extent"]:
            raise ValueError(
                f"{name}: size is {size}; it must be between 1 and {content['extent']}, the extent"
            )
    return content


def digest_of(graph: fx.Graph) -> str:
    """Return the sha256 of the operations of a graph and of the shapes of their results."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ""
        digest.update(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {shape}\n".encode())
    return digest.hexdigest()


def parsed_bytes(size: int | float | str) -> int:
    """Return a number of bytes, given as a number or as a text such as "2 GB" or "512 MiB".

    Raises:
        ValueError: `size` is not a size above 0.
    """
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    num_bytes: Any = size
    if found is not None and found[2].lower() in _UNITS:
        num_bytes = float(found[1]) * _UNITS[found[2].lower()]
    is_number = isinstance(num_bytes, int | float) and not isinstance(num_bytes, bool)
    if not is_number or not 1 <= num_bytes < 2**63:
        raise ValueError(
            f'memory_budget={size!r:.80}: give bytes above 0, or a text such as "2 GB" or "512 MiB"'
        )
    return int(num_bytes)


def common_module(names: Sequence[str]) -> str:
    """Return the innermost module that contains all modules of the given names."""
    common = names[0].split(".")
    for name in names[1:]:
        parts = name.split(".")
        same = [number for number, each in enumerate(common) if parts[number : number + 1] != [each]]
        common = common[: same[0]] if same else common
    return ".".join(common)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "~" + text[-(width - 1) :]
