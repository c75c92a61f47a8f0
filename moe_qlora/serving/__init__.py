"""From a trained adapter to a server's answer.

In goes an adapter folder and its base; out comes a folder in the layout that vLLM, SGLang or
llama.cpp takes, and a comparison of what the server answers with what was trained. Open `export.py`
first, which reads the table of what each server takes (`servers.json`).
"""
