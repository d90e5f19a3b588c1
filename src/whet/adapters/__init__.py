"""The LoRA family: layers, target selection, attaching and merging, and NF4 quantization."""
