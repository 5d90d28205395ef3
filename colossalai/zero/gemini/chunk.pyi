from colossalai.compat.chunk import *
