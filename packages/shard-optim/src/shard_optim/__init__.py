"""Any torch optimizer with its state sharded over the data-parallel ranks."""
