"""Traces: the operations of a model and their costs, computed without memory and without ranks."""
