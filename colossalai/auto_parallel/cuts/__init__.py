"""Cuts: how each layer of a model can be cut over tensor-parallel ranks, and which tensors follow."""
