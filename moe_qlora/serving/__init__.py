"""Serving: an adapter folder and its base go in.

Out comes a folder in the layout that vLLM, SGLang or llama.cpp loads, and a comparison of the
server's answers with the trained model's. Open `export.py` first, which reads the table of servers'
layouts (`servers.json`).
"""
