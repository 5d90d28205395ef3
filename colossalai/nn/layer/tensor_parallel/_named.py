"""The layers of each tensor mode under their documented names."""

from colossalai.nn.layer.tensor_parallel._modes import (
    ModeClassifier,
    ModeDropout,
    ModeEmbedding,
    ModeLayerNorm,
    ModeLinear,
    ModePatchEmbedding,
    VocabParallelModeClassifier,
    VocabParallelModeEmbedding,
    of_mode,
)

VanillaLinear = of_mode(ModeLinear, None, "VanillaLinear")
VanillaLayerNorm = of_mode(ModeLayerNorm, None, "VanillaLayerNorm")
VanillaEmbedding = of_mode(ModeEmbedding, None, "VanillaEmbedding")
VanillaPatchEmbedding = of_mode(ModePatchEmbedding, None, "VanillaPatchEmbedding")
VanillaClassifier = of_mode(ModeClassifier, None, "VanillaClassifier")

Linear1D = of_mode(ModeLinear, "1d", "Linear1D")
LayerNorm1D = of_mode(ModeLayerNorm, "1d", "LayerNorm1D")
Embedding1D = of_mode(ModeEmbedding, "1d", "Embedding1D")
PatchEmbedding1D = of_mode(ModePatchEmbedding, "1d", "PatchEmbedding1D")
Classifier1D = of_mode(ModeClassifier, "1d", "Classifier1D")
VocabParallelEmbedding1D = of_mode(VocabParallelModeEmbedding, "1d", "VocabParallelEmbedding1D")
VocabParallelClassifier1D = of_mode(VocabParallelModeClassifier, "1d", "VocabParallelClassifier1D")
Dropout1D = of_mode(ModeDropout, "1d", "Dropout1D")

Linear2D = of_mode(ModeLinear, "2d", "Linear2D")
LayerNorm2D = of_mode(ModeLayerNorm, "2d", "LayerNorm2D")
Embedding2D = of_mode(ModeEmbedding, "2d", "Embedding2D")
PatchEmbedding2D = of_mode(ModePatchEmbedding, "2d", "PatchEmbedding2D")
Classifier2D = of_mode(ModeClassifier, "2d", "Classifier2D")
VocabParallelEmbedding2D = of_mode(VocabParallelModeEmbedding, "2d", "VocabParallelEmbedding2D")
VocabParallelClassifier2D = of_mode(VocabParallelModeClassifier, "2d", "VocabParallelClassifier2D")

Linear2p5D = of_mode(ModeLinear, "2.5d", "Linear2p5D")
LayerNorm2p5D = of_mode(ModeLayerNorm, "2.5d", "LayerNorm2p5D")
Embedding2p5D = of_mode(ModeEmbedding, "2.5d", "Embedding2p5D")
PatchEmbedding2p5D = of_mode(ModePatchEmbedding, "2.5d", "PatchEmbedding2p5D")
Classifier2p5D = of_mode(ModeClassifier, "2.5d", "Classifier2p5D")
VocabParallelEmbedding2p5D = of_mode(VocabParallelModeEmbedding, "2.5d", "VocabParallelEmbedding2p5D")
VocabParallelClassifier2p5D = of_mode(VocabParallelModeClassifier, "2.5d", "VocabParallelClassifier2p5D")

Linear3D = of_mode(ModeLinear, "3d", "Linear3D")
LayerNorm3D = of_mode(ModeLayerNorm, "3d", "LayerNorm3D")
Embedding3D = of_mode(ModeEmbedding, "3d", "Embedding3D")
PatchEmbedding3D = of_mode(ModePatchEmbedding, "3d", "PatchEmbedding3D")
Classifier3D = of_mode(ModeClassifier, "3d", "Classifier3D")
VocabParallelEmbedding3D = of_mode(VocabParallelModeEmbedding, "3d", "VocabParallelEmbedding3D")
VocabParallelClassifier3D = of_mode(VocabParallelModeClassifier, "3d", "VocabParallelClassifier3D")
