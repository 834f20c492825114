"""What ``agl demo`` runs: a small text-to-SQL agent that learns on a laptop."""
