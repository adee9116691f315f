"""Consoles, pages and charts: what people read of a run."""
