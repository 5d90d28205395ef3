"""What the rules of `state.py` allow, each with its reason."""

# (file, name): why it is not a field of an object that somebody makes and destroys.
STATE = {
    (
        "auto_parallel/prediction/_prediction.py",
        "_replay_of",
    ): "kept results: a schedule of some sizes, which hundreds of predictions of a search run",
    (
        "auto_parallel/prediction/_prediction.py",
        "_balanced",
    ): "kept results: how the same blocks are split into the same number of stages",
    (
        "auto_parallel/solver/_elimination.py",
        "_lowered",
    ): "kept results: the order of elimination of a graph, which hundreds of problems of a search share",
    (
        "checkpoint_io/storage/_async_save.py",
        "_pending",
    ): "the one save in the background; no object outlives it",
    (
        "communication/_ledger.py",
        "open_ledgers",
    ): "the ledgers that are open, which collectives of any caller write to",
    ("context/_process.py", "process"): "torch's generators, what watches and the end are the process's, "
    "and layers leave losses for a criterion that any model may stand between",
    (
        "inference/paging/_calls.py",
        "_call",
    ): "a context variable: which paged call this thread is in, which a model's own forward cannot pass on",
    (
        "kernel/_installation.py",
        "installation",
    ): "kernels of operators are replaced for the whole process",
    (
        "launcher/preflight/_probe_network.py",
        "_listeners",
    ): "a script of its own on another host: its process",
    (
        "nn/layer/cached_embedding/_table.py",
        "_IN_FILES",
    ): "caches whose newest rows are written at the end of the process; held weakly",
    (
        "tensor/_box.py",
        "_is_tiled",
    ): "kept results: a run saves the same boxes again and again",
    ("logging/_logger.py", "_logger_of"): "one logger of a name, as in logging itself",
    (
        "pipeline/execution/_split_backward.py",
        "_saved_names",
    ): "kept results: the attributes of a class of nodes",
    (
        "inference/products/_products.py",
        "fewest_rows",
    ): "kept results: a measurement of the processor, once for a type",
    (
        "inference/products/_quantized_products.py",
        "integer_products_saturate",
    ): "kept result: one product of the processor",
    ("shardformer/_layers.py", "class_of"): "layers of one class stay of one class",
    ("lazy/_tape.py", "_numbers"): "tells tapes apart over all contexts of the process",
    (
        "monitor/_flight_recorder.py",
        "records",
    ): "like torch's own recorder: the watchdog asks about every group of the process",
    ("monitor/_sections.py", "_registry"): "sections of threads, which other threads read",
    (
        "pipeline/stages/_tied_weights.py",
        "_numbers",
    ): "the order in which weights were shared, the same on all ranks",
    (
        "tensor/colo/_cut.py",
        "_is_memory",
    ): "a context variable: whether functions take ColoTensors as memory, for this thread and block",
    ("zero/_elementwise.py", "_declared"): "classes of optimizers that users declare to be elementwise",
    (
        "zero/_init_context.py",
        "_watch_optimizers",
    ): "one hook of torch on all optimizers: those of ColoParameters that no one boosts",
}

# (file, function): why the class of an object that is there already is changed.
CLASS_CHANGES = {
    ("initialize.py", ""): "`colossalai.initialize` is documented as a function and as a module of functions",
    (
        "runtime/recomputation/_segments.py",
        "run_in_segments",
    ): "the call of a block, its hooks included, runs inside the call of its segment",
    (
        "shardformer/_layers.py",
        "_change_class",
    ): "a layer of the user's class keeps its identity and its names, and computes something else",
    (
        "tensor/colo/_tensor.py",
        "as_colo_parameter",
    ): "optimizers and tied modules hold the parameter, which users call as a ColoParameter from then on",
    (
        "tensor/colo/_tensor.py",
        "as_plain_parameter",
    ): "the way back: torch calls `__torch_function__` of a subclass in each operation",
    (
        "zero/gemini/_hooks.py",
        "add",
    ): "optimizers and modules hold the parameter, whose uses are intercepted: [Note: interception of uses]",
}

# (file, function): why it reads the local names of a call, or its frame.
LOCALS = {
    (
        "monitor/_calls.py",
        "properties_of",
    ): "the line of the user's code that issues a collective is reported",
    (
        "monitor/_sections.py",
        "current_module",
    ): "autograd functions of other libraries have no argument for the module that calls them",
}

SAME_CLASS_NAME = {
    "DataParallelSampler": "the documented name, with the ranks of the launched job and with those given",
}

# Function: why it compares a measured time; there is one of each kind, in the tier `long`.
MEASUREMENTS = {
    "test_a_search_takes_less_than_a_minute_of_processor_time": "counts of steps miss slow steps",
}
