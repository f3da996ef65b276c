"""What decisions leave behind: the store that all replicas share, and the prefix profiles. Never imports choose."""
