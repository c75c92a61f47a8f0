"""In goes a model by name, out comes the model without weights on the meta device.

named.py   read a folder, configuration file, model type or hub id, and build it
files.py   tell a path that is there from a name; read JSON that others wrote, bounded, with one
           sentence for whatever is wrong with it; match their regular expressions under a bound
"""
