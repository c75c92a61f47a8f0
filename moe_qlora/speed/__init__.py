"""Speed: a model that trains goes in, and the same model comes out, with less waiting in its steps.

Open graphs.py first.

graphs.py      decoder layers as CUDA graphs, for training that waits for the host
recording.py   one call of a layer as two graphs, and their replay
decoding.py    one step of generation as a graph
"""
