"""Serving: an adapter folder and its base go in.

Out comes a folder in the layout that vLLM, SGLang or llama.cpp loads. Open `export.py`, which reads
the table of servers' layouts (`servers.json`).
"""
