"""Triton kernels, and autograd functions with explicit backward passes."""
