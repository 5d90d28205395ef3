"""Vision transformers: the model, the published sizes, and weights from Hugging Face."""

from colossalai.model_zoo.vit._config import ViTConfig as ViTConfig
from colossalai.model_zoo.vit._hugging_face import from_hugging_face as from_hugging_face
from colossalai.model_zoo.vit._model import ViT as ViT
from colossalai.model_zoo.vit._parts import ViTBlock as ViTBlock
from colossalai.model_zoo.vit._parts import ViTEmbedding as ViTEmbedding
from colossalai.model_zoo.vit._parts import ViTHead as ViTHead
from colossalai.model_zoo.vit._sizes import VIT_BASE as VIT_BASE
from colossalai.model_zoo.vit._sizes import VIT_HUGE as VIT_HUGE
from colossalai.model_zoo.vit._sizes import VIT_LARGE as VIT_LARGE
from colossalai.model_zoo.vit._sizes import VIT_LITE as VIT_LITE
from colossalai.model_zoo.vit._sizes import VIT_SMALL as VIT_SMALL
from colossalai.model_zoo.vit._sizes import vit_base_patch16_224 as vit_base_patch16_224
from colossalai.model_zoo.vit._sizes import vit_base_patch32_224 as vit_base_patch32_224
from colossalai.model_zoo.vit._sizes import vit_huge_patch14_224 as vit_huge_patch14_224
from colossalai.model_zoo.vit._sizes import vit_large_patch16_224 as vit_large_patch16_224
from colossalai.model_zoo.vit._sizes import vit_lite_patch4_32 as vit_lite_patch4_32
from colossalai.model_zoo.vit._sizes import vit_small_patch16_224 as vit_small_patch16_224
