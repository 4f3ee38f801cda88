"""From a model's name to tensors that are still on disk.

`source` finds the files, `safetensors` and `gguf` read them, `checkpoint` is what both give. Sizes in a file are
claims: each is compared with the file's own size before it is used. Imports quantization, backends.ops and the
modules of layer 0 only.
"""
