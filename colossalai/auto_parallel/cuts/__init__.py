"""Cuts: the ways to cut each layer of a model over tensor-parallel ranks, and the tensors that follow."""
