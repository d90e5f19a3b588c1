"""The LoRA family: layers, targets, attaching and merging, NF4."""
