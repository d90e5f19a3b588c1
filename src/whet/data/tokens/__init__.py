"""Convert records to token ids and loss masks."""
