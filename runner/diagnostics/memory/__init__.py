"""Measure, forecast and explain what a step holds in memory."""
