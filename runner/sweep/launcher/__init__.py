"""What runs the jobs of a sweep: processes of our own, or those of a plugin of Hydra's."""
