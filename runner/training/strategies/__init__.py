"""Share a model's training among processes."""
