"""Parts of tools/demo.py: the text it trains on, the work, what is seen of it, and its picture."""
