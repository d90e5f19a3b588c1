"""Triton kernels and explicit backward passes."""
