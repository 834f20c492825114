"""One file for each algorithm: pure ``advantages()`` and ``loss()``."""
