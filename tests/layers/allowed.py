"""What the rules of `state.py` allow, each with its reason."""

# (file, name): why it is not a field of an object that somebody makes and destroys.
STATE = {
    (
        "checkpoint_io/storage/_async_save.py",
        "_pending",
    ): "the one save in the background; no object outlives it",
    (
        "communication/_ledger.py",
        "_open",
    ): "the ledgers that are open, which collectives of any caller write to",
    ("context/_ending.py", "_before_end"): "what packages above ask for before the groups are destroyed",
    ("context/_launch.py", "_launches"): "tells launches of one process apart in a store that outlives them",
    ("context/_random.py", "_seeds"): "torch's generators are the process's, and so is whose turn it is",
    (
        "context/_watching.py",
        "_watching",
    ): "what watches over the launched job, read at the exit of the process",
    (
        "launcher/preflight/_probe_network.py",
        "_listeners",
    ): "a script of its own on another host: its process",
    ("lazy/_tape.py", "_numbers"): "tells tapes apart over all contexts of the process",
    ("monitor/_sections.py", "_known"): "what threads are in, which others ask about from outside",
    (
        "pipeline/stages/_tied_weights.py",
        "_numbers",
    ): "the order in which weights were shared, the same on all ranks",
    ("zero/_elementwise.py", "_declared"): "classes of optimizers that users declare to be elementwise",
}

# (file, constant with the name of the attribute): on what, and what for.
HUNG = {
    (
        "checkpoint_io/_global_plan.py",
        "_PREFIX",
    ): "a stage's module: what stands before its names in checkpoints",
    ("checkpoint_io/_global_plan.py", "_TIED_NAMES"): "a parameter: its names in the whole model",
    ("lazy/_tape.py", "_ATTRIBUTE"): "a storage of a lazy tensor: the steps that write it",
    (
        "nn/parallel/_ddp.py",
        "_IGNORED",
    ): "a module, while DDP reads it: torch's own name for ignored parameters",
    ("pipeline/stages/_chunks.py", "_MARK"): "a module: it is a part of a model that is cut already",
    ("pipeline/stages/_tied_weights.py", "_ATTRIBUTE"): "a parameter: the stages that share it",
    ("tensor/_flat_range.py", "_ATTRIBUTE"): "a parameter: the range of it that its optimizer states are of",
    ("tensor/_sharded_module.py", "_BUILT_FOR"): "a module: what its specs were made for",
    ("tensor/_spec.py", "_ATTRIBUTE"): "a tensor: its sharding spec",
    ("tensor/_spec.py", "_FRAGMENT_OF"): "a tensor: of which one it is a piece, over which ranks",
}

SAME_CLASS_NAME = {
    "DataParallelSampler": "the documented name, with the ranks of the launched job and with those given",
}

# Folders of tests that are over the limit, until they are moved.
FULL_TEST_FOLDERS = ("checkpoint_io", "nn/layer", "parity", "pipeline")
