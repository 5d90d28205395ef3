"""BERT encoders with the head of a masked language model: model, loss, sizes, weights from Hugging Face."""

from colossalai.model_zoo.bert._config import BertConfig as BertConfig
from colossalai.model_zoo.bert._hugging_face import from_hugging_face as from_hugging_face
from colossalai.model_zoo.bert._loss import BertMLMLoss as BertMLMLoss
from colossalai.model_zoo.bert._model import Bert as Bert
from colossalai.model_zoo.bert._model import BertBlock as BertBlock
from colossalai.model_zoo.bert._model import BertEmbedding as BertEmbedding
from colossalai.model_zoo.bert._model import BertHead as BertHead
from colossalai.model_zoo.bert._sizes import BERT_BASE as BERT_BASE
from colossalai.model_zoo.bert._sizes import BERT_LARGE as BERT_LARGE
from colossalai.model_zoo.bert._sizes import bert_base as bert_base
from colossalai.model_zoo.bert._sizes import bert_large as bert_large
