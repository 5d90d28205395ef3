from colossalai.compat.builder import *
