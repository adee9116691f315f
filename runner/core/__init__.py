"""Config, policy, loop, record, run: what every run is made of. It knows none of the rooms."""
