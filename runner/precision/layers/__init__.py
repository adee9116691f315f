"""Replacement layers of converting precisions."""
