"""Chunk sizes as values, under their documented names."""

from colossalai.compat.chunk._chunk_manager import ChunkManager as ChunkManager
from colossalai.compat.chunk._chunk_manager import GeminiManager as GeminiManager
from colossalai.compat.chunk._chunk_manager import init_chunk_manager as init_chunk_manager
from colossalai.zero.gemini import search_chunk_configuration as search_chunk_configuration
