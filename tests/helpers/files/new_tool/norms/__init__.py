"""Say how large the weights of a run are: a tool as a newcomer would add it."""
