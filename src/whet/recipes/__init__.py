"""Recipes: everything that one objective kind does differently, one file per kind."""
