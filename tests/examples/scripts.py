"""Run the scripts of examples/ on the ranks of the tests, and import their modules."""

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_script(script: str, *args: str) -> None:
    """Run a script of examples/ as `python script args...` would; the function that ranks call."""
    path = EXAMPLES / script
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def config_file(folder: Path, config: Path, **values: Any) -> Path:
    """Write a config that begins with `from base import *`, with the values of its base and others."""
    base, own = config.with_name("base.py").read_text(), config.read_text().replace("from base import *", "")
    path = folder / config.name
    path.write_text(base + own + "".join(f"{key} = {value!r}\n" for key, value in values.items()))
    return path


def example_module(file: str) -> ModuleType:
    """Import a module of examples/, and what it imports of its folder, under a name of its own.

    Several examples have a data.py: what lies beside a module is forgotten under its plain name.
    """
    path = EXAMPLES / file
    name = f"example_{path.parent.name}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        before = set(sys.modules)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(sys.modules[name])
        finally:
            sys.path.remove(str(path.parent))
        for sibling in set(sys.modules) - before - {name}:
            origin = getattr(sys.modules[sibling], "__file__", None)
            if origin is not None and Path(origin).parent == path.parent:
                del sys.modules[sibling]
    return sys.modules[name]
