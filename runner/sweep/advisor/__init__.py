"""mode=advise: trials of a config in several precisions, and what they say."""
