"""The commands of whet as functions; `import whet` has them all."""
