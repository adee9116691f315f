"""The run spec, its checks, and the objects that its nodes name."""
