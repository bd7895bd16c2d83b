"""Real ranks that train, one fault, and what becomes of it."""
