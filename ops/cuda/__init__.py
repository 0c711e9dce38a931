"""The ops on a CUDA GPU. Everything here but `kernels/` imports without Triton and computes on CPU tensors too."""
