"""Booster: takes model, optimizer and loader, and returns them with the methods of a plugin built in.

The functions for models with adapters of peft are `adapters_off`, `has_adapters`, `merge` and
`merged_tensors`; `colossalai.chat` also uses the functions that write adapter folders.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name
from colossalai.booster._booster import Booster as Booster

if TYPE_CHECKING:
    from colossalai.booster._lora import TensorsByName as TensorsByName
    from colossalai.booster._lora import adapters_off as adapters_off
    from colossalai.booster._lora import has_adapters as has_adapters
    from colossalai.booster._lora import merge as merge
    from colossalai.booster._lora import merged_tensors as merged_tensors
    from colossalai.booster._lora import raw_of as raw_of
    from colossalai.booster._lora import refuse_unmergeable as refuse_unmergeable
    from colossalai.booster._lora import save_adapters as save_adapters
    from colossalai.booster._lora import with_config as with_config
    from colossalai.booster._lora import write_config as write_config

_LORA = (
    *("TensorsByName", "adapters_off", "has_adapters", "merge", "merged_tensors", "raw_of"),
    *("refuse_unmergeable", "save_adapters", "with_config", "write_config"),
)


def __getattr__(name: str) -> Any:
    """Import a function of `_lora` at its first access (PEP 562)."""
    return find_name(__name__, dict.fromkeys(_LORA, f"{__name__}._lora"), name)
