"""How the processes of a run share its work."""
