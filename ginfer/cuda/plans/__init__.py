"""Launch-plan tables, data only: one module per capability, PLANS maps (op, bucket) to a plan."""
