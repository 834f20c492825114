"""What a benchmark needs of the systems it compares: an environment, a process that takes turns, the same work."""
