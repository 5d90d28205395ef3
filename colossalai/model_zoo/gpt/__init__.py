"""GPT decoders: the model, its loss, and the published sizes."""

from colossalai.model_zoo.gpt._config import GPTConfig as GPTConfig
from colossalai.model_zoo.gpt._hugging_face import from_hugging_face as from_hugging_face
from colossalai.model_zoo.gpt._hugging_face import to_hugging_face as to_hugging_face
from colossalai.model_zoo.gpt._hugging_face import to_hugging_face_config as to_hugging_face_config
from colossalai.model_zoo.gpt._loss import GPTLMLoss as GPTLMLoss
from colossalai.model_zoo.gpt._model import GPT as GPT
from colossalai.model_zoo.gpt._parts import GPTBlock as GPTBlock
from colossalai.model_zoo.gpt._parts import GPTEmbedding as GPTEmbedding
from colossalai.model_zoo.gpt._parts import GPTLMHead as GPTLMHead
from colossalai.model_zoo.gpt._sizes import GPT2_LARGE as GPT2_LARGE
from colossalai.model_zoo.gpt._sizes import GPT2_MEDIUM as GPT2_MEDIUM
from colossalai.model_zoo.gpt._sizes import GPT2_SMALL as GPT2_SMALL
from colossalai.model_zoo.gpt._sizes import GPT2_XL as GPT2_XL
from colossalai.model_zoo.gpt._sizes import GPT3 as GPT3
from colossalai.model_zoo.gpt._sizes import gpt2_large as gpt2_large
from colossalai.model_zoo.gpt._sizes import gpt2_medium as gpt2_medium
from colossalai.model_zoo.gpt._sizes import gpt2_small as gpt2_small
from colossalai.model_zoo.gpt._sizes import gpt2_xl as gpt2_xl
from colossalai.model_zoo.gpt._sizes import gpt3 as gpt3
