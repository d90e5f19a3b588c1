"""The quality-decision task: a tabular mixture of experts, its data, recipe and file formats."""
