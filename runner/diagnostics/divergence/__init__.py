"""Find where two executions of one model part, module by module: the engine of mode=diff."""
