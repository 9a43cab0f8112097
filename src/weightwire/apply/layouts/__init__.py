"""From the names of a checkpoint to the memory of an engine: traced from its own loader, then written."""
