"""From the name of a model to its configuration, and to the model without weights on meta.

named.py   read a folder, configuration file, model type or hub id, and build it
files.py   tell paths from names; read JSON of others, bounded, with a sentence for each fault
"""
