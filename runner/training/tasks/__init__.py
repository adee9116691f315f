"""Tasks: the loss to minimise and the metrics to report."""
