"""Generated records (`synth:NAME`)."""
