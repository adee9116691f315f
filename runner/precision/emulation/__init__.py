"""Compute low-precision formats in wider arithmetic, for machines without their hardware."""
