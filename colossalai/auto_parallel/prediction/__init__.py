"""Predictions: the seconds of a step and the bytes of a rank, from cuts, sizes and recomputation."""
