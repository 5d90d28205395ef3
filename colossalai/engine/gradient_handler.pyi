from colossalai.compat.gradient_handler import *
