"""Chunk sizes as values, under their documented names."""

from colossalai.zero.gemini._search import search_chunk_configuration as search_chunk_configuration
from colossalai.zero.gemini.chunk._chunk_manager import ChunkManager as ChunkManager
from colossalai.zero.gemini.chunk._chunk_manager import GeminiManager as GeminiManager
from colossalai.zero.gemini.chunk._chunk_manager import init_chunk_manager as init_chunk_manager
