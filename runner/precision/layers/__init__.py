"""Hold the layers that converting precisions put in the place of linear layers and norms."""
