"""The profile of a machine, and what operations cost by it."""
