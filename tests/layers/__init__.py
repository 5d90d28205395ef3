"""The rules of the house (ARCHITECTURE.md): which module may import which, and what may stand where."""
