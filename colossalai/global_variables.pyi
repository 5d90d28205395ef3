from colossalai.compat._global_variables import *
