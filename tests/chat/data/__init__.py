"""The data of chat training: formats, tokens, packing, batches, made-up rows."""
