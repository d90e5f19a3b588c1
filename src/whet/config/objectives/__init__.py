"""One file per objective kind."""
