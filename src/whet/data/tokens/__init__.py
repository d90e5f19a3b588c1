"""From records to tokens and loss masks."""
