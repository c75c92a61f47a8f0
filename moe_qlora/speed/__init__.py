"""Speed: a model that trains goes in; the same model, with less waiting in its steps, comes out.

graphs.py      decoder layers as CUDA graphs, for training and `generate`; open it first
recording.py   one call of a layer as graphs, and their replay
masks.py       block masks of flex attention as arguments of graphs
gathered.py    router logits as outputs of graphs
"""
