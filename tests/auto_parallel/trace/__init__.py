"""The trace of a model and the profile of its operations."""
