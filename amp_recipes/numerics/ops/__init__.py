"""Lists the effect of autocast on each op."""
