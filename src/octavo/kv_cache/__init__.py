"""Which KV lives where: how layers share blocks, which blocks are free, which hold a known prefix.

Owns block ids, reference counts and the prefix map; never the tensors (the worker's arena). Block ids and
token ids are plain integers: nothing here imports torch or NumPy.
"""
