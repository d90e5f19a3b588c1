"""The layers of the LoRA family."""
