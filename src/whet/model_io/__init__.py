"""Everything that opens or writes models."""
