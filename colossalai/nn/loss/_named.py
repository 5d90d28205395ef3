"""The cross entropies of each tensor mode under their documented names."""

from colossalai.nn.layer import HEAD_SCHEMES, Cut
from colossalai.nn.loss._cross_entropy import ModeCrossEntropyLoss


def _of_mode(mode: str, name: str, *, vocab_parallel: bool) -> type[ModeCrossEntropyLoss]:
    scheme = HEAD_SCHEMES[mode][0]
    cut = scheme.y if vocab_parallel else Cut(batch=scheme.x.batch)
    doc = f"The cross entropy of mode {mode!r} over logits cut as {cut}; see `ModeCrossEntropyLoss`."
    return type(
        name,
        (ModeCrossEntropyLoss,),
        {"mode": mode, "cut_of_mode": cut, "__doc__": doc, "__module__": "colossalai.nn.loss"},
    )


VocabParallelCrossEntropyLoss1D = _of_mode("1d", "VocabParallelCrossEntropyLoss1D", vocab_parallel=True)
CrossEntropyLoss2D = _of_mode("2d", "CrossEntropyLoss2D", vocab_parallel=False)
VocabParallelCrossEntropyLoss2D = _of_mode("2d", "VocabParallelCrossEntropyLoss2D", vocab_parallel=True)
CrossEntropyLoss2p5D = _of_mode("2.5d", "CrossEntropyLoss2p5D", vocab_parallel=False)
VocabParallelCrossEntropyLoss2p5D = _of_mode("2.5d", "VocabParallelCrossEntropyLoss2p5D", vocab_parallel=True)
CrossEntropyLoss3D = _of_mode("3d", "CrossEntropyLoss3D", vocab_parallel=False)
VocabParallelCrossEntropyLoss3D = _of_mode("3d", "VocabParallelCrossEntropyLoss3D", vocab_parallel=True)
