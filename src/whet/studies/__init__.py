"""Many runs, or one question about a config."""
