"""What a person names goes in, a model without weights on the meta device comes out.

named.py   read a folder, configuration file, trainer's YAML, model type or hub id, and build it
places.py  tell a path that is there from a name, without torch
files.py   read JSON that others wrote: bounded, with one sentence for whatever is wrong with it
patterns.py  regular expressions of files: matched first in a process that can be ended
"""
