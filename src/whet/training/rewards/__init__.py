"""Rewards: functions `(prompt, completion, record) -> float`, run in processes of their own."""
