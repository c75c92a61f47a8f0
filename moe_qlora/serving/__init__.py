"""Serving: `export.py` writes an adapter in the layout that vLLM, SGLang or llama.cpp loads."""
