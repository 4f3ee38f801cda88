"""The CPU backend's side of the C++ extension: what the processor offers, and the kernels.

The only folder that imports `octavo._native`.
"""
