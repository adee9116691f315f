"""Callbacks: they read records and never steer the loop."""
