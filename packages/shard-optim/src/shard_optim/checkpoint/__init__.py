"""What a sharded optimizer saves and loads: folders for any number of ranks, and plain state."""
