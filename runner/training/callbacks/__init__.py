"""Observers read records and never steer the loop."""
