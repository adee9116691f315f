"""mode=plan: what a run would hold, convert and cost, on this machine and on a card."""
