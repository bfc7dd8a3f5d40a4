"""Kernels on raw tensors. The only room that imports triton: its modules are imported where one is launched."""
