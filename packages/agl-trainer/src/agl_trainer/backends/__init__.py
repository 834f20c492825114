"""What generates tokens: one folder or file for each backend."""
