"""Installation report: versions, devices, speed, libraries, and whether they fit (`colossalai check -i`).

Nothing here fails: missing information or a failed import is a line of the report. Features of torch are
tested, not versions.
"""

import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossalai._version import __version__
from colossalai.cluster._speed import ProcessorSpeed, Product, measure_speed

_MIN_PYTHON = (3, 11)
_IMPORT_TIMEOUT_S = 120.0
_BACKENDS = ("shared_memory", "gloo", "nccl", "xccl", "ucc", "mpi")
# Distribution, imported module and use in this package: the libraries of the extras in pyproject.toml, and
# those that the package imports if they are installed.
_LIBRARIES = (
    ("transformers", "transformers", "models of Hugging Face"),
    ("tokenizers", "tokenizers", "text of one's own"),
    ("jinja2", "jinja2", "chat templates"),
    ("peft", "peft", "adapters (LoRA)"),
    ("datasets", "datasets", "chat data of Hugging Face"),
    ("pyarrow", "pyarrow.parquet", "chat data in parquet files"),
    ("scipy", "scipy.optimize", "plans of Colossal-Auto"),
    ("fastapi", "fastapi", "the server"),
    ("uvicorn", "uvicorn", "the server"),
    ("pydantic", "pydantic", "the server"),
    ("prometheus_client", "prometheus_client", "metrics of the server"),
    ("llguidance", "llguidance", "answers in a given form"),
    ("ray", "ray", "serving and answers by Ray"),
    ("pyyaml", "yaml", "configs in YAML"),
    ("tensorboard", "tensorboard.summary.writer.event_file_writer", "curves while training"),
    ("wandb", "wandb", "curves while training"),
    ("mlflow", "mlflow", "curves while training"),
    ("matplotlib", "matplotlib.pyplot", "plots"),
    ("scikit-learn", "sklearn.datasets", "the images of the examples"),
    ("torchvision", "torchvision", "image models and data"),
    ("timm", "timm", "image models"),
)
# Dotted names below `torch` that the package builds on; the last of them came with torch 2.11 or before.
_TORCH_ABILITIES = (
    "accelerator.current_accelerator",
    "distributed.device_mesh.init_device_mesh",
    "distributed.fsdp.fully_shard",
    "distributed.checkpoint.state_dict.get_model_state_dict",
    "nn.functional.scaled_dot_product_attention",
    "nn.attention.flex_attention.flex_attention",
    "utils.checkpoint.checkpoint",
)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that can train."""

    name: str
    kind: str
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Library:
    """An optional library: not installed, installed but broken, or good."""

    name: str
    purpose: str
    version: str | None  # None: not installed
    import_error: str | None  # None: it imports, or is not installed

    @property
    def is_broken(self) -> bool:
        """It is installed and does not import."""
        return self.import_error is not None

    @property
    def action(self) -> str:
        """The command that mends it; empty if it is not broken."""
        return f"pip install --force-reinstall {self.name}" if self.is_broken else ""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether two components are compatible; if not, the problem and the remedy."""

    name: str
    is_fit: bool
    detail: str
    action: str


@dataclass(frozen=True, kw_only=True)
class InstallationReport:
    """Installed components, and their compatibility."""

    versions: dict[str, str]
    devices: tuple[Device, ...]
    backends: dict[str, bool]
    libraries: tuple[Library, ...]
    speed: ProcessorSpeed
    fits: tuple[Fit, ...]

    @property
    def is_fit(self) -> bool:
        """Everything that the package needs is there."""
        return all(fit.is_fit for fit in self.fits)


def examine_installation(float32_products: Mapping[str, Product] | None = None) -> InstallationReport:
    """Look at everything; it takes some seconds, as every optional library is imported in its own process.

    Args:
        float32_products: Further implementations of float32 matrix products on the CPU, by name, to be
            measured together with torch's.
    """
    return InstallationReport(
        versions=_versions(),
        devices=_devices(),
        backends={name: dist.is_available() and dist.is_backend_available(name) for name in _BACKENDS},
        libraries=examine_libraries(_LIBRARIES),
        speed=measure_speed(float32_products),  # when the imports of the libraries have ended
        fits=(_python_fit(), _torch_fit(), _backend_fit()),
    )


def examine_libraries(
    libraries: tuple[tuple[str, str, str], ...], *, timeout_s: float = _IMPORT_TIMEOUT_S
) -> tuple[Library, ...]:
    """Return the state of each `(distribution, module, purpose)`; an import has `timeout_s` seconds."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return tuple(pool.map(lambda library: _library(*library, timeout_s=timeout_s), libraries))


def _library(distribution: str, module: str, purpose: str, *, timeout_s: float) -> Library:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Library(name=distribution, purpose=purpose, version=None, import_error=None)
    error = _import_error(module, timeout_s)
    return Library(name=distribution, purpose=purpose, version=version, import_error=error)


def _import_error(module: str, timeout_s: float) -> str | None:
    """Import a module in another process, where it may crash or hang, and return the error, if any."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"the import does not end within {timeout_s:.0f} s"
    if ended.returncode == 0:
        return None
    said = ended.stderr.strip().splitlines()
    return said[-1] if said else f"the import ends with exit code {ended.returncode}"


def _versions() -> dict[str, str]:
    return {
        "colossalai": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (torch build)": torch.version.cuda or "none: a build without CUDA",
        "NCCL": _nccl_version(),
    }


def _nccl_version() -> str:
    if not (dist.is_available() and dist.is_nccl_available()):
        return "none"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _devices() -> tuple[Device, ...]:
    import psutil

    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total
    cpu = Device(name=f"{_cpu_name()}, {cores} cores", kind="cpu", memory_gib=_gib(memory))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (cpu,)
    module: Any = torch.get_device_module(accelerator)
    found = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
    return (
        cpu,
        *(
            Device(name=each.name, kind=accelerator.type, memory_gib=_gib(each.total_memory))
            for each in found
        ),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


def _python_fit() -> Fit:
    needed = ".".join(str(part) for part in _MIN_PYTHON)
    is_fit = sys.version_info >= _MIN_PYTHON
    return Fit(
        name=f"Python >= {needed}",
        is_fit=is_fit,
        detail="" if is_fit else f"Python {platform.python_version()}",
        action="" if is_fit else f"install Python {needed} or newer",
    )


def _torch_fit() -> Fit:
    missing = [name for name in _TORCH_ABILITIES if not _torch_has(name)]
    detail = f"not found: torch.{', torch.'.join(missing)}" if missing else ""
    action = "install torch 2.11 or newer" if missing else ""
    return Fit(name="torch has what is used of it", is_fit=not missing, detail=detail, action=action)


def _torch_has(name: str) -> bool:
    module, _, attribute = f"torch.{name}".rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def _backend_fit() -> Fit:
    """Check that the ranks can talk from the devices they compute on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if not dist.is_available():
        detail, action = "this build of torch has no torch.distributed", "install torch from pytorch.org"
        return Fit(name="ranks can talk", is_fit=False, detail=detail, action=action)
    backend = dist.get_default_backend_for_device(kind)
    is_fit = dist.is_backend_available(backend)
    detail = "" if is_fit else f"this build of torch has no {backend}, which {kind} needs"
    action = "" if is_fit else f"install a build of torch with {backend}, as those from pytorch.org"
    return Fit(name=f"ranks can talk ({backend} for {kind})", is_fit=is_fit, detail=detail, action=action)
