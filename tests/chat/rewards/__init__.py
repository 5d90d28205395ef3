"""Rewards: what scores answers, what is written down of them, and what goes wrong."""
