"""Read and write weights and models in the formats of other programs."""
