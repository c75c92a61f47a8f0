"""One HTML page about a model, an adapter or a Trainer's run: write.py, and page.html."""
