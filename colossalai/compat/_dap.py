"""FastFold's spelling of the tensor mode "dap"."""

from colossalai.context import global_context, launch_from_torch, read_layout, relayout


def init_dap(tensor_model_parallel_size_: int | None = None) -> None:
    """Lay the job out for dynamic axial parallelism, before models are built; launch it if it is not.

    It launches with `{"parallel": {"tensor": {"size": ..., "mode": "dap"}}}` as the config. Gradients are
    averaged by the Booster or the engine.

    Args:
        tensor_model_parallel_size_: Number of ranks that share activations. Default: all.

    Raises:
        ConfigException: The size does not divide the number of ranks, or the job is laid out otherwise.
    """
    if not global_context.is_launched:
        launch_from_torch({}, verbose=False)
    world_size = global_context.mesh.world_size
    size = world_size if tensor_model_parallel_size_ is None else tensor_model_parallel_size_
    relayout(read_layout({"tensor": {"size": size, "mode": "dap"} if size != 1 else {}}))
