from colossalai.compat.utils import *
