"""Older spellings of the documents: modules that scripts import, and nothing inside the package does.

Each is imported under its documented path, by the rows of `colossalai._aliases`: `colossalai.utils` is
`colossalai.compat.utils`.
"""
