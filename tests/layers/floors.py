"""The floors of the package: a module imports from its own floor and from those below, never from above."""

ROOT = "colossalai"

FLOORS = {
    # 0: the ground
    "_aliases": 0,
    "_clock": 0,
    "_lazy": 0,
    "_not_landed": 0,
    "_version": 0,
    "logging": 0,
    "registry": 0,
    # 1: place
    "cluster": 1,
    "launcher": 1,
    "monitor": 1,
    "context": 1,
    # 2: tensors
    "communication": 2,
    "device": 2,
    "kernel": 2,
    "tensor": 2,
    # 3: methods
    "amp": 3,
    "lazy": 3,
    "nn": 3,
    "pipeline": 3,
    "zero": 3,
    # 4: runtime
    "auto_parallel": 4,
    "autochunk": 4,
    "checkpoint_io": 4,
    "fx": 4,
    "inference": 4,
    "model_zoo": 4,
    "runtime": 4,
    "shardformer": 4,
    # 5: doors
    "booster": 5,
    "cli": 5,
    "core": 5,  # the global context under its documented name: below the doors nothing reads it
    "engine": 5,
    "initialize": 5,
    "serving": 5,
    "trainer": 5,
    # 6: the package itself gathers the doors; what stands on them; the facades may import anything
    "": 6,
    "chat": 6,
    "compat": 6,
    "testing": 6,
}

# Older spellings: `_aliases.py` alone names its modules.
COMPAT = "compat"

# Nothing below imports these; a facade may import another one only through its home.
TOP = 6

# On floor 3 these meet in `runtime`, and never each other.
STRANGERS = ("nn.layer", "pipeline", "zero", "lazy")
# And these know tensors only, none of the methods.
TENSORS_ONLY = ("amp", "nn.optimizer", "nn.lr_scheduler", "nn.init")

# From this floor on the global context may be read: doors and facades.
DOORS = 5
# Below it, and outside of `context` itself, these files may, and why.
CONTEXT_READERS = {
    "communication/_collectives.py": "documented functions take a ParallelMode of the launched job",
    "inference/__main__.py": "the program of a rank, which launches a job of its own",
    "launcher/_notebook.py": "it starts jobs out of a process that may have launched one",
    "nn/layer/tensor_parallel/_launched.py": "constructors of layers without a mesh ask there",
    "nn/layer/sequence_parallel/_scores.py": "documented functions are given no axis",
    "nn/layer/sequence_parallel/_self_attention.py": "the documented constructor takes no mesh",
    "pipeline/stages/_tied_weights.py": "the documented constructor takes no mesh",
    "tensor/colo/_process_group.py": "the documented constructor takes degrees, and no mesh",
    "zero/_model.py": "zero_model_wrapper and GeminiDDP are doors of their own, by their documented names",
}

# Names that say nothing about what is inside. The facade folders are documented names.
VAGUE_NAMES = ("utils", "util", "common", "helpers", "helper", "misc")
FACADES = ("compat.utils", "testing")

# Where the name of one vendor's devices has to be spelled, and why.
VENDOR_FILES = {
    "_aliases.py": "colossalai.utils.cuda is a documented module",
    "nn/layer/cached_embedding/_param_mgr.py": "cuda_row_num and cuda_cached_weight are documented names",
    "nn/layer/cached_embedding/parallel/_placement.py": "cuda_row_num is a documented name",
    "auto_parallel/_verify.py": "the memory that its products keep between calls has no other name in torch",
    "compat/_seed.py": "a documented keyword",
    "cluster/_doctor.py": "it reports the versions of that vendor's libraries",
    "zero/gemini/planning/_policy.py": "the documented name of a placement policy",
}
