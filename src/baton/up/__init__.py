"""A fleet on this machine: a router and instances as processes that are started, watched, restarted and stopped together."""
