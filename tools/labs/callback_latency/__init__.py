"""What host work in a replayed graph costs, transport by transport."""
