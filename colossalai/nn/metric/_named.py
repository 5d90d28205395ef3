"""The accuracies of each tensor mode under their documented names: over logits with all classes."""

from typing import ClassVar

from colossalai.nn.layer import LINEAR_SCHEMES, Cut, require_mode
from colossalai.nn.metric._accuracy import Accuracy


class _ModeAccuracy(Accuracy):
    mode: ClassVar[str]
    cut_of_mode: ClassVar[Cut]

    def __init__(self) -> None:
        require_mode(self.mode, by=type(self).__name__)
        super().__init__(cut=self.cut_of_mode)


def _of_mode(mode: str, name: str) -> type[_ModeAccuracy]:
    cut = Cut(batch=LINEAR_SCHEMES[mode][0].x.batch)
    doc = f"The accuracy of mode {mode!r}, over logits cut as {cut}; see `Accuracy`."
    return type(
        name,
        (_ModeAccuracy,),
        {"mode": mode, "cut_of_mode": cut, "__doc__": doc, "__module__": "colossalai.nn.metric"},
    )


Accuracy2D = _of_mode("2d", "Accuracy2D")
Accuracy2p5D = _of_mode("2.5d", "Accuracy2p5D")
Accuracy3D = _of_mode("3d", "Accuracy3D")
