"""Configs of other tools (axolotl, LLaMA-Factory, mlx-lm, TRL) translated into whet's."""
